"""Records as JSON: under which names fields are on disk, which hold however attributes are called.

The names in these tables are in every store, so they are never changed. A new field gets a default,
by which older records are read. What older releases would misread raises the format's number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from vane_dagster.errors import StoreError

T = TypeVar("T")

FORMAT = "format"
"""The field that holds a file's format. One that has none is of the first."""


@dataclass(frozen=True)
class Codec(Generic[T]):
    """How objects of a dataclass are written.

    Attributes:
        kind: The dataclass.
        names: Each field's name on disk, and its attribute.
        read: What makes an attribute's value of what JSON has, by attribute. Default: nothing.
        write: The reverse, likewise.
    """

    kind: Callable[..., T]
    names: Mapping[str, str]
    read: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    write: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)

    def record(self, value: T) -> dict[str, Any]:
        """An object as JSON holds it."""
        return {
            name: self.write.get(attribute, _same)(getattr(value, attribute))
            for name, attribute in self.names.items()
        }

    def load(self, record: Mapping[str, Any], **known: Any) -> T:
        """The object that a record holds; fields that it lacks have their default.

        Args:
            record: The record. Fields that no table names are passed over.
            **known: Attributes that are known from elsewhere.

        Raises:
            TypeError: If one without a default is in neither.
        """
        given = {
            attribute: self.read.get(attribute, _same)(record[name])
            for name, attribute in self.names.items()
            if name in record
        }
        return self.kind(**{**given, **known})


def _same(value: Any) -> Any:
    return value


class NewerFormatError(StoreError):
    """A file was written by a newer release, in a format that this one does not know."""


def require_format(record: Any, newest: int, file: str) -> None:
    """Refuses what a newer release has written in another format.

    Args:
        record: What the file holds.
        newest: The newest format that is known here.
        file: The file, for the message.

    Raises:
        NewerFormatError: If its format is newer.
    """
    found = record.get(FORMAT, 1) if isinstance(record, Mapping) else 1
    if not isinstance(found, int) or found > newest:
        raise NewerFormatError(
            f"{file!r} has format {found!r}, and this release of vane_dagster knows formats up to "
            f"{newest}: a newer one has written it. Upgrade vane_dagster here, in each environment "
            "that uses the store; nothing was changed"
        )
