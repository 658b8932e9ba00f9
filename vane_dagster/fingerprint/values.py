"""Digests of values that are the same in every process; what has none is refused by its path."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import ipaddress
import os
import pathlib
import re
import struct
import types
import typing
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vane_dagster._secrets import is_wrapped
from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.arrays import ArrayEncoder
from vane_dagster.fingerprint.files import LocalFiles, UnboundedContentError
from vane_dagster.fingerprint.hashing import combine

_CODE = (
    type,
    functools.partial,
    staticmethod,
    classmethod,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.MethodWrapperType,
    types.ModuleType,
)
_SCALARS = (bool, int, float, complex, str, bytes)
_CONTAINERS = (dict, list, tuple, set, frozenset, bytearray, collections.deque)
_AS_TEXT = (
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    datetime.date,
    datetime.timedelta,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    ipaddress.IPv4Interface,
    ipaddress.IPv6Interface,
    ipaddress.IPv4Network,
    ipaddress.IPv6Network,
)
_PYDANTIC_STATE = ("__pydantic_extra__", "__pydantic_private__", "__pydantic_fields_set__")
_NO_STATE = frozenset({"__dict__", "__weakref__", "__pydantic_root_model__", *_PYDANTIC_STATE})


class ValueEncoder:
    """Hashes values; functions, classes and modules go to the `code` that it was given."""

    def __init__(self, code: Callable[[Any, str], str], files: LocalFiles | None = None) -> None:
        self._code = code
        self._files = files or LocalFiles()
        # With `version=`, which stands for content, an object counts by its type.
        self._strict = self._files.read
        self._arrays = ArrayEncoder(self.digest)
        self._open: set[int] = set()

    def digest(self, value: Any, path: str) -> str:
        """Hashes a value.

        Args:
            value: What to hash.
            path: How the user reaches it, for messages: ``fn_constructor_kwargs['client']``.

        Raises:
            CodeIdentityError: The value, or something in it, has no stable identity.
        """
        if value is None or value is Ellipsis or value is NotImplemented:
            return combine(repr(value))
        kind = type(value)
        if kind in _SCALARS:
            return self._scalar(value, kind, path)
        origin = typing.get_origin(value)
        # `list[int]`, which Python 3.10 calls a type; `Generic` is its own origin.
        if origin is not None and origin is not value:
            parts = (origin, *typing.get_args(value))
            return combine("generic", *self._each(parts, path))
        if isinstance(value, type(typing.ClassVar)):
            return combine("typing", repr(value))
        if isinstance(value, _CODE):
            return self._code(value, path)
        if id(value) in self._open:
            raise CodeIdentityError(
                f"{path} refers back to itself, so it has no stable identity. Pass plain values "
                f"without cycles, or give the stage `version=`."
            )
        self._open.add(id(value))
        try:
            return self._compound(value, path)
        except RecursionError:
            raise CodeIdentityError(
                f"{path} is nested too deeply to have an identity. Pass flatter values, or give "
                f"the stage `version=`."
            ) from None
        finally:
            self._open.discard(id(value))

    def _compound(self, value: Any, path: str) -> str:
        for step in (self._arrays.encode, self._standard, self._container, self._record):
            found = step(value, path)
            if found is not None:
                return found
        if hasattr(value, "__wrapped__") and callable(value):
            return self._code(value, path)
        kind = type(value)
        if not self._strict:
            return combine("opaque", kind.__module__, kind.__qualname__)
        raise CodeIdentityError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which has no stable identity: it "
            f"cannot be told from one process to the next whether it is the same. Pass plain "
            f"values and build the object inside the class, or give the stage `version=`."
        )

    def _scalar(self, value: Any, kind: type, path: str) -> str:
        if kind is str:
            text = str.__str__(value)
            return self._with_content("str", text, text, path)
        if kind is bytes:
            plain = bytes(value)
            if b"/" not in plain or len(plain) > 1024:
                return combine("bytes", plain)
            return self._with_content("bytes", plain, os.fsdecode(plain), path)
        if kind is float:
            return combine("float", struct.pack(">d", value))
        if kind is complex:
            return combine("complex", struct.pack(">dd", value.real, value.imag))
        if kind is int:
            return combine("int", hex(int(value)))
        return combine(kind.__name__, repr(value))

    def _with_content(
        self, tag: str, text: str | bytes, named: str | os.PathLike[str], path: str
    ) -> str:
        """Hashes a text, and the content of the file or folder that it may name."""
        content = self._files.content(named, path)
        return combine(tag, text) if content is None else combine(tag, text, content)

    def _kind(self, value: Any, base: type, path: str) -> str:
        """A type's name, or the code of a subclass."""
        kind = type(value)
        return base.__name__ if kind is base else self._code(kind, path)

    def _standard(self, value: Any, path: str) -> str | None:
        if isinstance(value, enum.Enum):
            return self._member(value, path)
        if isinstance(value, pathlib.PurePath):
            if type(value).__module__.startswith("pathlib"):
                return self._with_content("path", value.as_posix(), value, path)
            kind, text = self._code(type(value), path), str(value)
            named = text if "://" in text else pathlib.PurePath(text)
            return self._with_content(kind, text, named, path)
        if isinstance(value, (datetime.datetime, datetime.time)):
            base = datetime.time if isinstance(value, datetime.time) else datetime.datetime
            text = value.replace(tzinfo=None).isoformat()
            zone = self._zone(value, value.tzinfo, path)
            return combine("time", self._kind(value, base, path), text, str(value.fold), zone)
        if isinstance(value, datetime.tzinfo):
            return combine("zone", self._zone(None, value, path))
        for plain in _AS_TEXT:
            if isinstance(value, plain):
                return combine("as text", self._kind(value, plain, path), str(value))
        if isinstance(value, re.Pattern):
            pattern = self.digest(value.pattern, f"{path}.pattern")
            return combine("pattern", pattern, str(value.flags))
        if is_wrapped(value):
            return combine("secret", self.digest(value.get_secret_value(), path))
        if isinstance(value, (range, slice)):
            bounds = (value.start, value.stop, value.step)
            return combine(type(value).__name__, *self._each(bounds, path))
        if type(value) is array.array:
            return combine("array", value.typecode, *self._each(value.tolist(), path))
        return None

    def _member(self, value: enum.Enum, path: str) -> str:
        kind = self._code(type(value), path)
        name = "" if isinstance(value, enum.Flag) else value.name
        try:
            content = self.digest(value.value, f"{path}.value")
        except UnboundedContentError:
            raise
        except CodeIdentityError:
            content = value.name  # as the class's code makes it
        return combine("enum", kind, name, content)

    def _zone(self, time: Any, zone: datetime.tzinfo | None, path: str) -> str:
        if zone is None:
            return combine("naive")
        if type(zone) is datetime.timezone:
            return combine("offset", str(zone.utcoffset(None)), zone.tzname(None))
        if type(zone) is zoneinfo.ZoneInfo and zone.key is not None:
            return combine("zone", zone.key)
        text = repr(zone)
        if " at 0x" in text:
            raise CodeIdentityError(
                f"{path} has a time zone of {type(zone).__qualname__}, which has no stable "
                f"identity. Use zoneinfo.ZoneInfo, or give the stage `version=`."
            )
        offset = "" if time is None else str(time.utcoffset())
        return combine("other zone", self._code(type(zone), path), text, offset)

    def _container(self, value: Any, path: str) -> str | None:
        kind = type(value)
        if isinstance(value, types.MappingProxyType):
            return combine("mapping", *self._items(dict(value), path))
        if kind is collections.ChainMap:
            return combine("chain", *self._each(value.maps, f"{path}.maps"))
        if not isinstance(value, (*_SCALARS, *_CONTAINERS)):
            return None
        base = next(item for item in (*_SCALARS, *_CONTAINERS) if isinstance(value, item))
        is_scalar = base in _SCALARS
        parts = [self._scalar(value, base, path)] if is_scalar else self._items(value, path)
        if isinstance(value, collections.deque):
            parts.append(str(value.maxlen))
        if kind is base:
            return combine(kind.__name__, *parts)
        if isinstance(value, collections.defaultdict):
            parts.append(self.digest(value.default_factory, f"{path}.default_factory"))
        state = combine("state", *self._attributes(_state(value), path))
        return combine(f"subclass of {base.__name__}", self._code(kind, path), state, *parts)

    def _items(self, value: Any, path: str) -> list[str]:
        """Hashes a container's items in their order, which can change a result."""
        if isinstance(value, bytearray):
            return [bytes(value).hex()]
        if isinstance(value, dict):
            parts = []
            for key, item in dict.items(value):
                where = f"{path}[{repr(key)[:60]}]"
                parts += [self.digest(key, f"{where} key"), self.digest(item, where)]
            return parts
        if isinstance(value, (set, frozenset)):
            return sorted(self.digest(item, f"{path}{{...}}") for item in value)
        return self._each(value, path)

    def _attributes(self, state: Mapping[str, Any], path: str) -> list[str]:
        return [combine(name, self.digest(item, f"{path}.{name}")) for name, item in state.items()]

    def _each(self, values: Iterable[Any], path: str) -> list[str]:
        return [self.digest(item, f"{path}[{index}]") for index, item in enumerate(values)]

    def _record(self, value: Any, path: str) -> str | None:
        """Hashes an instance whose attributes are all of it, by its class's code and by them."""
        kind = type(value)
        is_model = hasattr(kind, "model_fields") and callable(getattr(value, "model_dump", None))
        if not (
            is_model
            or dataclasses.is_dataclass(kind)
            or hasattr(kind, "__attrs_attrs__")
            or kind in (types.SimpleNamespace, argparse.Namespace)
        ):
            return None
        state = _state(value)
        if is_model:
            state |= {name: getattr(value, name, None) for name in _PYDANTIC_STATE}
        return combine("record", self._code(kind, path), *self._attributes(state, path))


def _state(value: Any) -> dict[str, Any]:
    """An object's attributes, those in slots included; without values that are kept of others."""
    found: dict[str, Any] = {}
    for kind in reversed(type(value).__mro__):
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            stored = f"_{kind.__name__.lstrip('_')}{name}" if private else name
            if name not in _NO_STATE and hasattr(value, stored):
                found[stored] = getattr(value, stored)
    found |= getattr(value, "__dict__", {})
    cached = {
        name
        for kind in type(value).__mro__
        for name, item in vars(kind).items()
        if isinstance(item, functools.cached_property)
    }
    return {name: item for name, item in found.items() if name not in cached}
