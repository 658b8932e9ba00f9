"""Column types of Python annotations, such as the return type of a user's function."""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import datetime as dt
import enum
import inspect
import sys
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pyarrow as pa

from vane_dagster.errors import SchemaError
from vane_dagster.types.callables import captured_by

_SCALARS: Mapping[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    dt.datetime: pa.timestamp("us"),
    dt.date: pa.date32(),
    dt.time: pa.time64("us"),
    dt.timedelta: pa.duration("us"),
}
_LISTS = (list, tuple, set, frozenset, abc.Sequence, abc.Collection, abc.Iterable)
_QUALIFIERS = ("Required", "NotRequired", "ReadOnly")
"""Names of forms that typing has, or typing_extensions before Python 3.13."""
_STREAMS = (abc.Iterator, abc.Generator, abc.Iterable, abc.AsyncIterator, abc.AsyncGenerator,
            abc.AsyncIterable)  # fmt: skip


def hints(function: Any) -> dict[str, Any]:
    """The annotations of a function's parameters and of its result, as far as they resolve."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):  # a name only type checkers import, or a builtin
        scope = _scope(function)
        annotations = getattr(function, "__annotations__", {})
        return {name: _resolved(each, scope) for name, each in annotations.items()}


def _scope(defined: Any) -> dict[str, Any]:
    """Return the names of a function's module and of the functions around it."""
    function = inspect.unwrap(defined) if callable(defined) else defined
    names = dict(vars(sys.modules.get(getattr(function, "__module__", None) or "", object)))
    names |= getattr(function, "__globals__", {})
    return names | captured_by(function)


def _resolved(annotation: Any, scope: dict[str, Any]) -> Any:
    """Return an annotation; as text if a name in it is not defined."""
    if not isinstance(annotation, str):
        return annotation
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, scope, include_extras=True)["it"]
    except (NameError, TypeError, AttributeError, SyntaxError):
        return annotation


def element_of(annotation: Any) -> Any:
    """Return the annotation of what an iterator, generator or list yields; None for another."""
    annotation = plain(annotation)
    if isinstance(annotation, str):
        return annotation
    arguments = get_args(annotation)
    if get_origin(annotation) in (*_STREAMS, *_LISTS) and arguments:
        return arguments[0]
    return None


def is_stream(annotation: Any) -> bool:
    """Return whether an annotation is that of a generator's result."""
    return get_origin(annotation) in _STREAMS


def arrow_type(annotation: Any) -> pa.DataType:
    """Return the Arrow type of a Python annotation."""
    return _arrow(annotation, ())


def has_fields(annotation: Any) -> bool:
    """Return whether an annotation is a dataclass, TypedDict, NamedTuple or pydantic model."""
    return _fields(plain(annotation)) is not None


def is_mapping(annotation: Any) -> bool:
    """Return whether an annotation is a dict, another mapping or a TypedDict."""
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, abc.Mapping)


def _arrow(annotation: Any, above: tuple[Any, ...]) -> pa.DataType:
    annotation = plain(annotation)
    if isinstance(annotation, pa.DataType):
        return annotation
    if isinstance(annotation, (str, typing.ForwardRef)):
        text = annotation if isinstance(annotation, str) else annotation.__forward_arg__
        raise SchemaError(
            f"{text!r}, with a name that cannot be looked up. Define or import it at the top level "
            "of the module, not under TYPE_CHECKING or in a function, or declare the type by "
            "schema="
        )
    if callable(to_arrow := getattr(annotation, "to_arrow_dtype", None)):
        arrow_type: pa.DataType = to_arrow()
        return arrow_type
    if annotation in above:
        raise SchemaError(f"{_name(annotation)} contains itself, and a column has a fixed depth")
    above = (*above, annotation)
    if (fields := _fields(annotation)) is not None:
        return pa.struct([pa.field(name, _arrow(kind, above)) for name, kind in fields.items()])
    if isinstance(annotation, type):
        if annotation in _SCALARS:
            return _SCALARS[annotation]
        if issubclass(annotation, enum.Enum):
            return _common([member.value for member in annotation], annotation)
        if issubclass(annotation, np.generic):
            return pa.from_numpy_dtype(np.dtype(annotation))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _common(arguments, annotation)
    if origin in _LISTS and arguments and len({*arguments} - {Ellipsis}) == 1:
        return pa.list_(_arrow(arguments[0], above))
    if is_mapping(annotation) and len(arguments) == 2:
        return pa.map_(_arrow(arguments[0], above), _arrow(arguments[1], above))
    raise SchemaError(
        f"{_name(annotation)} does not determine the type of a column; expected a scalar, "
        "list[...], dataclass, TypedDict, NamedTuple or pydantic model. Declare it by schema="
    )


def plain(annotation: Any) -> Any:
    """Return an annotation without ``| None``, aliases and qualifiers such as ``NotRequired``.

    ``Annotated`` becomes the Arrow type in it, if there is one.
    """
    while True:
        origin, arguments = get_origin(annotation), get_args(annotation)
        named = getattr(annotation, "__supertype__", None) or getattr(annotation, "__value__", None)
        if named is not None and not isinstance(annotation, type):  # NewType, or a type alias
            annotation = named
        elif getattr(origin, "_name", None) in _QUALIFIERS:
            annotation = arguments[0]
        elif origin is Annotated:
            given = [each for each in arguments[1:] if isinstance(each, pa.DataType)]
            annotation = given[0] if given else arguments[0]
        elif origin in (Union, types.UnionType):
            left = [each for each in arguments if each is not type(None)]
            if len(left) != 1:
                return annotation
            annotation = left[0]
        else:
            return annotation


def _fields(annotation: Any) -> dict[str, Any] | None:
    if not isinstance(annotation, type):
        return None
    if isinstance(model := getattr(annotation, "model_fields", None), Mapping):
        return {name: field.annotation for name, field in model.items()}
    if dataclasses.is_dataclass(annotation):
        types = hints(annotation)
        return {field.name: types[field.name] for field in dataclasses.fields(annotation)}
    if hasattr(annotation, "__optional_keys__") or hasattr(annotation, "_fields"):
        return hints(annotation)
    return None


def _common(values: Any, annotation: Any) -> pa.DataType:
    try:
        return pa.array([value for value in values if value is not None]).type
    except pa.ArrowInvalid as error:
        raise SchemaError(f"{_name(annotation)} has values of several types: {error}") from None


def _name(annotation: Any) -> str:
    is_class = isinstance(annotation, type) and not get_args(annotation)
    return annotation.__qualname__ if is_class else str(annotation)
