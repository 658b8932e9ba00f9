"""`dataclasses.dataclass` for internal classes, whose methods are shared in place of compiled.

The standard decorator compiles up to six methods for each class, which takes a millisecond; a
process that executes a step makes more than a hundred classes. Here only ``__init__`` is compiled.
Classes that users may derive from have the standard decorator: sources, checks, publishers and
providers.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]


@functools.cache
def _names(cls: Any, use: str) -> tuple[str, ...]:
    """Return the names of the fields with an option such as "repr"."""
    fields = dataclasses.fields(cls)
    # `hash` is None where it is as `compare`.
    uses = [each.compare if (own := getattr(each, use)) is None else own for each in fields]
    return tuple(each.name for each, is_used in zip(fields, uses) if is_used)


def _values(self: Any, use: str) -> tuple[Any, ...]:
    return tuple([getattr(self, name) for name in _names(self.__class__, use)])


def _eq(self: Any, other: object) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return _values(self, "compare") == _values(other, "compare")


def _hash(self: Any) -> int:
    return hash(_values(self, "hash"))


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = [f"{name}={getattr(self, name)!r}" for name in _names(self.__class__, "repr")]
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _set_once(self: Any, name: str, value: Any) -> None:
    """Set a field, which `__init__` does; refuse to change it."""
    values = self.__dict__
    if name in values or name not in self.__dataclass_fields__:
        _refuse(self, name)
    values[name] = value


def _refuse(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot assign to or delete field {name!r}")


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, *, frozen: bool = False, **options: Any) -> Any:
        """Make a dataclass, with the parameters `frozen`, `init` and `kw_only`."""
        if cls is None:
            return functools.partial(dataclass, frozen=frozen, **options)
        shared = {"__repr__": _repr, "__eq__": _eq, "__hash__": _hash if frozen else None}
        if frozen:
            shared |= {"__setattr__": _set_once, "__delattr__": _refuse}
        for name in shared.keys() - vars(cls).keys():
            setattr(cls, name, shared[name])
        return dataclasses.dataclass(cls, eq=False, repr=False, **options)
