"""JSON in the store: records of dataclasses, and files that hold one record.

The fields on disk have the attributes' names, which stores contain: a dataclass gains fields with a
default and never loses one. A change that older releases would misread increments `STORE_FORMAT`,
which the changed file then names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property, partial
from types import MappingProxyType, UnionType
from typing import (
    Any,
    Generic,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from vane_dagster.errors import NewerFormatError, StoreError
from vane_dagster.storage.filesystem import StoragePath

T = TypeVar("T")
_Convert = Callable[[Any], Any]

UNRECORDED = MappingProxyType({"recorded": False})
"""The metadata of fields that are not recorded."""

FORMAT = "format"
"""The field with a file's format. A file without the field has format 1."""
STORE_FORMAT = 1
"""The newest format of the store's files."""


class _Field(NamedTuple):
    """A recorded field: its default, which is MISSING without one, and how values are converted."""

    name: str
    default: Any
    read: _Convert
    write: _Convert


@dataclass(frozen=True)
class Codec(Generic[T]):
    """The JSON representation of a dataclass: its fields, without those that have their default.

    Their types say how: a dataclass is an object, a named tuple a list, a set a sorted list, and an
    Arrow schema a text. Sequences are read as tuples, and a number where a text is expected as its
    digits. Fields with the metadata `UNRECORDED` are left out.

    Attributes:
        kind: The dataclass.
    """

    kind: type[T]

    @cached_property
    def _fields(self) -> Sequence[_Field]:
        types = get_type_hints(self.kind)
        return [
            _Field(
                each.name,
                each.default if each.default_factory is MISSING else each.default_factory(),
                *_converters(types[each.name]),
            )
            for each in fields(self.kind)  # type: ignore[arg-type]  # of a class without a bound
            if each.metadata != UNRECORDED
        ]

    def record(self, value: T) -> dict[str, Any]:
        """Convert an object to a JSON record."""
        held = ((each, getattr(value, each.name)) for each in self._fields)
        return {
            each.name: each.write(given)
            for each, given in held
            if each.default is MISSING or given != each.default
        }

    def load(self, record: Mapping[str, Any], **known: Any) -> T:
        """Convert a record to an object; missing fields get their default."""
        held = (each for each in self._fields if each.name in record)
        return self.kind(**{each.name: each.read(record[each.name]) for each in held} | known)

    def dumps(self, value: T) -> bytes:
        """Convert an object to JSON."""
        return json.dumps(self.record(value)).encode()


def _converters(kind: Any) -> tuple[_Convert, _Convert]:
    """Return how values of a type are read from JSON, and how they are written."""
    if getattr(kind, "__module__", "") == "pyarrow.lib":  # imported by those alone that have one
        from vane_dagster.types.schema import read_schema, schema_record

        return read_schema, schema_record
    if is_dataclass(kind):
        codec: Codec[Any] = Codec(kind)  # type: ignore[arg-type]  # a class, and no instance
        return codec.load, codec.record
    if hasattr(kind, "_fields"):
        reads = [_converters(each)[0] for each in get_type_hints(kind).values()]
        return lambda record: kind(*(read(each) for read, each in zip(reads, record))), _same
    origin, parameters = get_origin(kind), [p for p in get_args(kind) if p is not type(None)]
    if origin in (Union, UnionType) and len(parameters) == 1:
        read, write = _converters(parameters[0])
        return partial(_unless_none, read), partial(_unless_none, write)
    if origin in (tuple, Sequence):
        read, write = _converters(parameters[0])
        return lambda values: tuple(map(read, values)), lambda values: [*map(write, values)]
    return (frozenset, sorted) if origin is Set else (str if kind is str else _same, _same)


def _unless_none(convert: _Convert, value: Any) -> Any:
    return None if value is None else convert(value)


def _same(value: Any) -> Any:
    return value


def require_format(record: Any, file: str) -> None:
    """Reject a record that a newer release has written in another format."""
    version = record.get(FORMAT, 1) if isinstance(record, Mapping) else 1
    if not isinstance(version, int) or version > STORE_FORMAT:
        raise NewerFormatError(
            f"{file!r} has format {version!r}, but this release of vane_dagster supports formats "
            f"up to {STORE_FORMAT}: a newer release wrote it. Upgrade vane_dagster here and in "
            "each environment that uses the store"
        )


def parse_file(data: bytes, url: str, parse: Callable[[Any], T], fix: str = "Delete it") -> T:
    """Parse a file of JSON; the error names the fix."""
    try:
        record = json.loads(data)
        require_format(record, url)
        return parse(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{url!r} is not readable: {error}. {fix}") from error


def read_file(
    folder: StoragePath, name: str, parse: Callable[[Any], T], fix: str = "Delete it"
) -> T | None:
    """Read and parse a file of JSON; None if there is none."""
    try:
        data = folder.read(name, is_small=True)
    except FileNotFoundError:
        return None
    return parse_file(data, folder.file_url(name), parse, fix)
