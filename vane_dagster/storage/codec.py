"""JSON in the store: records of dataclasses, and files that hold one record.

The fields on disk have the attributes' names, which stores contain: a dataclass gains fields with a
default and never loses one. A change that older releases would misread increments `STORE_FORMAT`,
which the changed file then names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any, Generic, TypeVar

from vane_dagster.errors import NewerFormatError, StoreError
from vane_dagster.storage.filesystem import Location

T = TypeVar("T")

FORMAT = "format"
"""The field with a file's format. A file without the field has format 1."""
STORE_FORMAT = 1
"""The newest format of the store's files."""


@dataclass(frozen=True)
class Codec(Generic[T]):
    """The JSON representation of a dataclass: its fields, without those that have their default.

    Attributes:
        kind: The dataclass.
        read: Functions that convert a JSON value to the attribute, by name; fields without one are
            used as they are.
        write: The reverse.
        omitted: Attributes that are not recorded.
    """

    kind: Callable[..., T]
    read: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    write: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The default of each recorded attribute; MISSING without one."""
        return {
            each.name: each.default if each.default_factory is MISSING else each.default_factory()
            for each in fields(self.kind)  # type: ignore[arg-type]  # a class, as a callable
            if each.name not in self.omitted
        }

    def record(self, value: T) -> dict[str, Any]:
        """Convert an object to a JSON record."""
        held = ((name, getattr(value, name), default) for name, default in self.defaults.items())
        return {
            name: self.write.get(name, _same)(given)
            for name, given, default in held
            if default is MISSING or given != default
        }

    def load(self, record: Mapping[str, Any], **known: Any) -> T:
        """Convert a record to an object; missing fields get their default."""
        given = {
            name: self.read.get(name, _same)(record[name])
            for name in self.defaults
            if name in record
        }
        return self.kind(**{**given, **known})


def _same(value: Any) -> Any:
    return value


def require_format(record: Any, file: str) -> None:
    """Reject a record that a newer release has written in another format."""
    found = record.get(FORMAT, 1) if isinstance(record, Mapping) else 1
    if not isinstance(found, int) or found > STORE_FORMAT:
        raise NewerFormatError(
            f"{file!r} has format {found!r}, and this release of vane_dagster knows formats up to "
            f"{STORE_FORMAT}: a newer one has written it. Upgrade vane_dagster here, and in each "
            "environment that uses the store"
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
    folder: Location, name: str, parse: Callable[[Any], T], fix: str = "Delete it"
) -> T | None:
    """Read and parse a file of JSON; None if there is none."""
    try:
        data = folder.read(name)
    except FileNotFoundError:
        return None
    return parse_file(data, folder.file_url(name), parse, fix)
