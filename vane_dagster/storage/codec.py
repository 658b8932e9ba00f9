"""Conversion of records to JSON, with stable field names on disk if an attribute is renamed.

Stores contain these names, so a table gains names and never changes or loses one. A new attribute
has a default, which is used for older records. A change that older releases would misread increases
the format's number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from vane_dagster.errors import NewerFormatError

T = TypeVar("T")

FORMAT = "format"
"""The field with a file's format. A file without the field has format 1."""


@dataclass(frozen=True)
class Codec(Generic[T]):
    """The JSON representation of a dataclass.

    Attributes:
        kind: The dataclass.
        names: Each field's name on disk, and its attribute.
        read: Functions that convert a JSON value to the attribute, by name on disk; fields without
            one are used as they are.
        write: The reverse.
    """

    kind: Callable[..., T]
    names: Mapping[str, str]
    read: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    write: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)

    def record(self, value: T) -> dict[str, Any]:
        """Convert an object to a JSON record."""
        return {
            name: self.write.get(name, _same)(getattr(value, attribute))
            for name, attribute in self.names.items()
        }

    def load(self, record: Mapping[str, Any], **known: Any) -> T:
        """Convert a record to an object; missing fields get their default."""
        given = {
            attribute: self.read.get(name, _same)(record[name])
            for name, attribute in self.names.items()
            if name in record
        }
        return self.kind(**{**given, **known})


def _same(value: Any) -> Any:
    return value


def require_format(record: Any, newest: int, file: str) -> None:
    """Reject a record that a newer release has written in another format."""
    found = record.get(FORMAT, 1) if isinstance(record, Mapping) else 1
    if not isinstance(found, int) or found > newest:
        raise NewerFormatError(
            f"{file!r} has format {found!r}, and this release of vane_dagster knows formats up to "
            f"{newest}: a newer one has written it. Upgrade vane_dagster here, and in each "
            "environment that uses the store"
        )
