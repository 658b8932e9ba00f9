"""Records as JSON: the names of fields on disk, which stay when an attribute is renamed.

Stores hold these names, so a table gains names and never changes or loses one. A new attribute has
a default, by which older records are read. A change that older releases would misread raises the
format's number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from vane_dagster.errors import NewerFormatError

T = TypeVar("T")

FORMAT = "format"
"""The field that holds a file's format. One that has none is of the first."""


@dataclass(frozen=True)
class Codec(Generic[T]):
    """How objects of a dataclass are written.

    Attributes:
        kind: The dataclass.
        names: Each field's name on disk, and its attribute.
        read: By name on disk, what makes the attribute of what JSON holds, where it is not that.
        write: The reverse.
    """

    kind: Callable[..., T]
    names: Mapping[str, str]
    read: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    write: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)

    def record(self, value: T) -> dict[str, Any]:
        """An object as JSON holds it."""
        return {
            name: self.write.get(name, _same)(getattr(value, attribute))
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
            attribute: self.read.get(name, _same)(record[name])
            for name, attribute in self.names.items()
            if name in record
        }
        return self.kind(**{**given, **known})


def _same(value: Any) -> Any:
    return value


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
            f"{newest}: a newer one has written it. Upgrade vane_dagster here, and in each "
            "environment that uses the store"
        )
