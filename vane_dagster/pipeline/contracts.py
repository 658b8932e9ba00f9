"""Contracts: how a user's callable is called with the rows of a stage, and what it returns.

A contract is derived from the declaration and travels to the workers with each call;
`worker/callers.py` makes the calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, Final, Literal, Union, get_args, get_origin

import numpy as np

from vane_dagster.errors import DefinitionError, names
from vane_dagster.pipeline.options import BatchFormat
from vane_dagster.sources.file import File
from vane_dagster.sources.raw_files import PATH
from vane_dagster.types.annotations import (
    hints,
    is_mapping,
    plain,
)
from vane_dagster.types.callables import qualname, signature_of, unwrapped

CALL: Final = "__call__"
"""The method that calls use unless a stage names another."""
RowResult = Literal["value", "values", "bool"]
"""What a row-wise function returns: one value, any number of values, or whether to keep the row."""
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

TYPES = "__types"
"""The column with the types that a call has returned; see `TypesCall`."""


class _Call:
    """What the contracts share.

    Attributes:
        by_row: Whether the callable is called for each row.
        form: The form of a call, for messages.
    """

    by_row: ClassVar[bool] = False
    form: ClassVar[str]

    @property
    def keyed(self) -> object:
        """The part of a stage's definition."""
        return tuple((name, getattr(self, name)) for name in self.__dataclass_fields__)  # type: ignore[attr-defined]  # of dataclasses

    def arguments(self) -> tuple[tuple[None, ...], dict[str, None]]:
        """Return placeholders for the arguments of a call."""
        return (None,), {}


@dataclass(frozen=True)
class BatchCall(_Call):
    """``fn(batch)`` returns a table, or a dict of column to array.

    Attributes:
        format: The type of a batch.
    """

    format: BatchFormat = "pyarrow"

    form: ClassVar[str] = "(batch, **fn_kwargs)"


@dataclass(frozen=True)
class RequestsCall(BatchCall):
    """``await fn(in_turns)`` makes a request for each row, and returns the batch's output.

    ``await in_turns(request)`` calls a coroutine function with each row, a dict, as soon as the
    worker has room for one more request. It returns their results, or the errors that they raised.
    """

    by_row: ClassVar[bool] = True


@dataclass(frozen=True)
class ColumnsCall(_Call):
    """``fn(column, ...)`` gets an array for each input column, and returns one column or several.

    Attributes:
        columns: The input columns, in the order of the parameters.
        format: The type of an array: a column of a batch of that format.
        shapes: The shape of a row's tensor for each column; None for a column as it is.
        output: The one column that the result is; None if its fields are columns.
        stacks: Whether a callable with one parameter gets several columns as one array of shape
            (rows, columns).
    """

    columns: tuple[str, ...]
    format: BatchFormat = "numpy"
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    output: str | None = None
    stacks: bool = False

    form: ClassVar[str] = "(column, ..., **fn_kwargs)"

    def arguments(self) -> tuple[tuple[None, ...], dict[str, None]]:
        """Return placeholders for the arguments of a call."""
        return (None,) * len(self.columns), {}


@dataclass(frozen=True)
class RowCall(_Call):
    """``fn(value, ...)`` is called for each row.

    Attributes:
        inputs: Parameters and the columns that they get; None if the callable gets the row as a
            dict.
        positional: The number of leading inputs that are passed by position.
        arrays: Columns of lists whose rows are passed as numpy arrays.
        output: The one column that the result is; None if its fields are columns.
        result: What the callable returns.
        files: Parameters that get a `File` for the path in their column.
    """

    inputs: tuple[tuple[str, str], ...] | None
    positional: int = 0
    arrays: tuple[str, ...] = ()
    output: str | None = None
    result: RowResult = "value"
    files: tuple[str, ...] = ()

    by_row: ClassVar[bool] = True
    form: ClassVar[str] = "(value, ..., **fn_kwargs)"

    def arguments(self) -> tuple[tuple[None, ...], dict[str, None]]:
        """Return placeholders for the arguments of a call."""
        if self.inputs is None:
            return (None,), {}
        named = {parameter: None for parameter, _ in self.inputs[self.positional :]}
        return (None,) * self.positional, named


@dataclass(frozen=True)
class TypesCall:
    """A call of another contract that keeps only the types of the results.

    Each input row gets one row, with the types of the columns that its call returned.

    Attributes:
        of: The contract of the call.
        column: The column that a single value is, if a row-wise callable names none.
    """

    of: Union[BatchCall, RowCall]
    column: str

    @property
    def by_row(self) -> bool:
        """Whether the callable is called for each row."""
        return self.of.by_row

    @property
    def keyed(self) -> object:
        """The part of a stage's definition."""
        return ("types", self.of.keyed)


DeclaredCall = Union[BatchCall, ColumnsCall, RowCall]
Contract = Union[DeclaredCall, TypesCall]


def row_call(
    location: str,
    call: Callable[..., Any],
    inputs: Mapping[str, str] | None,
    kwargs: Collection[str],
    output: str | None,
    result: RowResult,
    has_self: bool = False,
) -> RowCall:
    """Derive the contract of a row-wise callable from its signature.

    A parameter gets the column of its name, or the one that `columns` gives it. A parameter with a
    default keeps it unless `columns` names it. One annotated as `File` gets the file at the path in
    its column; the column of the parameter ``file`` is ``path``. A callable with the one parameter
    ``row``, or one annotated as a dict, mapping or TypedDict, gets the whole row.
    """
    given = dict(inputs or {})
    if (signature := signature_of(call)) is None:
        raise DefinitionError(
            f"{location}: {qualname(call)} has no signature to match with columns; wrap it in a "
            "function with one, such as `def fn(text): ...`"
        )
    parameters = list(signature.parameters.values())[has_self:]
    by_name = {each.name: each for each in parameters}
    if unknown := [name for name in given if name not in by_name]:
        raise DefinitionError(
            f"{location}: columns names the parameters {names(unknown)}, which {qualname(call)} "
            f"does not have; it has {names(by_name, 20)}"
        )
    if twice := [name for name in given if name in kwargs]:
        raise DefinitionError(f"{location}: {names(twice)} is in both columns and fn_kwargs")
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    free = [each for each in parameters if each.kind not in variadic and each.name not in kwargs]
    needed = [each for each in free if each.default is each.empty or each.name in given]
    leading = len(
        list(takewhile(lambda each: each in needed and each.kind in _BY_PLACE, parameters))
    )
    annotations = hints(unwrapped(call))
    if not given and len(needed) == 1 and _takes_row(needed[0], annotations):
        return RowCall(None, 0, (), output, result)
    if not needed:
        raise DefinitionError(
            f"{location}: {qualname(call)} has no parameter for a column; add a parameter named "
            "after a column, or a single parameter `row`"
        )
    are_files = {name for name in by_name if plain(annotations.get(name)) is File}
    own = {name: PATH if name in are_files and name == "file" else name for name in by_name}
    named = {each.name: given.get(each.name, own[each.name]) for each in needed}
    arrays = tuple(named[name] for name in named if _is_array(annotations.get(name)))
    files = tuple(name for name in named if name in are_files)
    return RowCall(tuple(named.items()), leading, arrays, output, result, files)


def columns_call(location: str, call: Callable[..., Any], by_row: RowCall) -> ColumnsCall:
    """Return the contract of a callable that gets an array in place of each value of a row."""
    if by_row.inputs is None or by_row.positional < len(by_row.inputs):
        raise DefinitionError(
            f"{location}: {qualname(call)} receives an array for each column, by position; name "
            'its parameters after the columns, or pass columns={"parameter": "column"}'
        )
    if by_row.result != "value":
        raise DefinitionError(
            f"{location}: {qualname(call)} returns a value for each row, in arrays; this kind of "
            "stage calls a function row by row: use map, or leave out .batch"
        )
    columns = tuple(column for _, column in by_row.inputs)
    kinds = [hints(call).get(parameter) for parameter, _ in by_row.inputs]
    formats = [array_format for kind in kinds if (array_format := _array_format(kind)) is not None]
    return ColumnsCall(columns, formats[0] if formats else "pyarrow", (), by_row.output)


def _array_format(annotation: Any) -> BatchFormat | None:
    """Return the batch format whose arrays an annotation names; None for other annotations."""
    annotation = plain(annotation)
    kind = get_origin(annotation) or annotation
    library = getattr(kind, "__module__", "").partition(".")[0]
    is_array = getattr(kind, "__name__", "") in ("ndarray", "Series", "Tensor")
    known: tuple[BatchFormat, ...] = get_args(BatchFormat)
    return next((each for each in known if is_array and each == library), None)


def _takes_row(parameter: inspect.Parameter, annotations: Mapping[str, Any]) -> bool:
    if parameter.name not in annotations:
        return parameter.name == "row"
    kind = plain(annotations[parameter.name])
    return is_mapping(kind) or (parameter.name == "row" and (kind is Any or isinstance(kind, str)))


def _is_array(annotation: Any) -> bool:
    annotation = plain(annotation)
    return (get_origin(annotation) or annotation) is np.ndarray
