"""What a function should return in place of values that Arrow cannot hold.

The texts name types and never contain values. Libraries are recognized by the names of their
classes, so none is imported.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import pathlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from vane_dagster.types.kinds import is_text
from vane_dagster.types.schema import sql_name
from vane_dagster.types.tensors import astype, is_element

_INSPECTED_ROWS = 1000
_WITH_VALUE = re.compile(r"^Could not convert .* with type (\w+): (.*)$", re.DOTALL)
_NARROW_FLOATS = ("bfloat16", "float8")


def explained(error: BaseException, values: Any, kind: pa.DataType) -> str:
    """Explain why a column cannot be converted, with what to return instead."""
    if type(error) is ValueError:  # ours; Arrow's are of subclasses
        return str(error)
    if advice := _about_column(values) or _about_rows(values, kind):
        return advice
    found = _WITH_VALUE.match(str(error))
    return f"a {found[1]} {found[2]}" if found else str(error)


def mismatch(found: pa.DataType, kind: pa.DataType, column: str) -> str:
    """Say what to do about values of another type."""
    convert = "Convert it in the function"
    if is_element(kind) and (is_element(found) or is_text(found)):
        convert = f"Return {astype(kind)}"
    elif expression := _expression(found, kind):
        convert = f"Return {expression} for each row"
    return _or_declare(convert, found, column)


def misfit(found: pa.DataType, kind: pa.DataType, column: str, reason: str) -> str:
    """Say what to do about values of a type that may be cast, but not all of these."""
    convert = "Return values that fit"
    if pa.types.is_floating(found) and pa.types.is_integer(kind):
        is_nan = " nan " in reason
        convert = "Return None in place of NaN" if is_nan else "Return rounded values"
    elif expression := _expression(found, kind):
        convert = f"Return {expression} for each row"
    return _or_declare(convert, found, column)


def _or_declare(convert: str, found: pa.DataType, column: str) -> str:
    if not column:
        return convert
    declared = sql_name(found)
    schema = f"declare { ({column: declared})!r}" if declared else "declare that type"
    return f"{convert}, or {schema} in the schema"


def _expression(found: pa.DataType, kind: pa.DataType) -> str:
    """Return the Python expression that converts a value; empty if none is known."""
    is_bytes = pa.types.is_binary(found) or pa.types.is_large_binary(found)
    if is_text(kind):
        text = "json.dumps(value)" if pa.types.is_nested(found) else "str(value)"
        return "value.decode()" if is_bytes else text
    if pa.types.is_decimal(kind) and pa.types.is_floating(found):
        return f"round(value, {kind.scale})"
    if pa.types.is_binary(kind) and is_text(found):
        return "value.encode()"
    if pa.types.is_date(kind) and pa.types.is_timestamp(found):
        return "value.date()"
    if pa.types.is_timestamp(kind) and pa.types.is_timestamp(found) and kind.tz != found.tz:
        zone = "datetime.timezone.utc"
        if found.tz is None:
            return f"value.replace(tzinfo={zone}), if its values are in UTC,"
        return f"value.astimezone({zone}).replace(tzinfo=None)"
    if pa.types.is_timestamp(kind) and is_text(found):
        return "datetime.datetime.fromisoformat(value)"
    return ""


def _about_column(values: Any) -> str | None:
    """Advise about a column as a whole: an array of a type that Arrow lacks, or no column."""
    if advice := _about_array(values):
        return advice
    if isinstance(values, Mapping):
        for name in ("logits", "last_hidden_state"):  # of a `ModelOutput` of transformers
            if name in values:
                return f"the whole output of a model. Return one of its tensors, output.{name}"
        return "a dict, not one value for each row. Return a list with a dict for each row"
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        return "a single value, not one for each row. Return a list or an array"
    return None


def _about_array(values: Any) -> str | None:
    kind = str(getattr(values, "dtype", "")).rpartition(".")[2]
    if kind.startswith(_NARROW_FLOATS):
        cast = ".float()" if hasattr(values, "detach") else '.astype("float32")'
        return f"Arrow has no {kind}, and float32 holds its values. Return value{cast}"
    if kind.startswith("complex"):
        return f"Arrow has no {kind}. Return value.real and value.imag, as two columns"
    if "sparse" in str(getattr(values, "layout", "")).lower():
        return "a sparse tensor. Return value.to_dense()"
    return None


def _about_rows(values: Any, kind: pa.DataType) -> str | None:
    rows = list(_rows(values))
    for value in rows:
        if advice := _about_array(value):
            return f"rows are arrays. {advice} for each row"
        if getattr(value, "ndim", None) == 0 and not isinstance(value, (int, float, complex)):
            return "rows are tensors without dimensions. Return value.item() for each row"
        if advice := _about_object(value, kind):
            return advice
    plain = {type(value) for value in rows}
    if rows and plain <= {str} and pa.types.is_struct(kind):
        return "rows are texts. Return json.loads(value) for each row"
    odd = next((value for value in rows if not isinstance(value, _PLAIN)), None)
    if odd is not None and not hasattr(odd, "dtype"):
        return (
            f"Arrow has no type for a {_named(odd)}. Return numbers, text, bytes, lists or dicts "
            "of them; pickle.dumps(value) in a BLOB column keeps an object as it is"
        )
    return None


def _rows(values: Any) -> Iterator[Any]:
    """Yield the first objects that are not null; an iterator is consumed already."""
    listed = isinstance(values, Sequence) and not isinstance(values, memoryview)
    if listed or getattr(getattr(values, "dtype", None), "kind", "") == "O":
        yield from (value for value in islice(iter(values), _INSPECTED_ROWS) if value is not None)


def _named(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{_root(kind)}.{kind.__name__}"


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


_PLAIN = (
    *(bool, int, float, str, bytes, dict, list, tuple),
    *(dt.date, dt.time, dt.timedelta, decimal.Decimal),
)


def _is_image(value: Any) -> bool:
    return any((_root(base), base.__name__) == ("PIL", "Image") for base in type(value).__mro__)


def _image(value: Any) -> str:
    width, height = value.size
    bands = len(value.getbands())
    shape = (height, width, bands) if bands > 1 else (height, width)
    return (
        "rows are PIL images. Return np.asarray(image) for each row, and declare "
        f'vd.tensor("uint8", {shape}); or return encoded bytes, and declare BLOB: '
        'buffer = io.BytesIO(); image.save(buffer, "PNG"); buffer.getvalue()'
    )


_RECORDS: Sequence[tuple[Callable[[Any], bool], str, str]] = (
    (
        lambda value: dataclasses.is_dataclass(value) and not isinstance(value, type),
        "dataclasses.asdict(value)",
        "json.dumps(dataclasses.asdict(value))",
    ),
    (
        lambda value: hasattr(type(value), "model_dump_json"),
        "value.model_dump()",
        "value.model_dump_json()",
    ),
    (
        lambda value: isinstance(value, tuple) and hasattr(value, "_asdict"),
        "value._asdict()",
        "json.dumps(value._asdict())",
    ),
)
"""Objects with fields: what to return for a STRUCT column, and for a VARCHAR column."""
_OBJECTS = (
    ((pathlib.PurePath,), "paths", "Return str(value) for each row"),
    ((uuid.UUID,), "UUIDs", "Return str(value) for each row"),
    ((set, frozenset), "sets", "Return sorted(value) for each row"),
    (
        (BaseException,),
        "exceptions",
        "Raise vd.RowErrors({position: error}, rows) to fail some rows",
    ),
)


def _about_object(value: Any, kind: pa.DataType) -> str | None:
    if _is_image(value):
        return _image(value)
    for applies, plain, text in _RECORDS:
        if applies(value):
            instead = text if is_text(kind) else plain
            column = "" if is_text(kind) else ", for a STRUCT column"
            return f"rows are {_named(value)} objects. Return {instead} for each row{column}"
    for kinds, what, advice in _OBJECTS:
        if isinstance(value, kinds):
            return f"rows are {what}. {advice}"
    return None
