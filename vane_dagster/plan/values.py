"""Digests of values that are the same in every process; what has none is refused by its path."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import os
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vane_dagster.errors import CodeIdentityError
from vane_dagster.masking import is_wrapped
from vane_dagster.plan.hashing import combine, local_content

_LONGEST_PATH = 1024
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


class ValueEncoder:
    """Hashes values; functions, classes and modules go to the `code` that it was given."""

    def __init__(self, code: Callable[[Any, str], str]) -> None:
        self._code = code
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
        if isinstance(value, _CODE):
            return self._code(value, path)
        kind = type(value)
        if kind in _SCALARS:
            return _scalar(value)
        if id(value) in self._open:
            raise CodeIdentityError(
                f"{path} refers back to itself, so it has no stable identity. Pass plain values "
                f"without cycles, or give the stage `version=`."
            )
        self._open.add(id(value))
        try:
            return self._compound(value, path)
        finally:
            self._open.discard(id(value))

    def _compound(self, value: Any, path: str) -> str:
        for step in (self._library, self._standard, self._container, self._record):
            found = step(value, path)
            if found is not None:
                return found
        if hasattr(value, "__wrapped__") and callable(value):
            return self._code(value, path)
        kind = type(value)
        raise CodeIdentityError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which has no stable identity: it "
            f"cannot be told from one process to the next whether it is the same. Pass plain "
            f"values and build the object inside the class, or give the stage `version=`."
        )

    def _standard(self, value: Any, path: str) -> str | None:
        if isinstance(value, enum.Enum):
            member = value.name or self.digest(value.value, f"{path}.value")
            return combine("enum", self._code(type(value), path), member)
        if isinstance(value, pathlib.PurePath):
            return _with_content("path", value.as_posix(), os.fspath(value))
        if isinstance(value, (datetime.datetime, datetime.time)):
            zone = getattr(value.tzinfo, "key", None) or str(value.utcoffset())
            text = value.replace(tzinfo=None).isoformat()
            return combine(type(value).__name__, text, str(value.fold), zone)
        if isinstance(value, (datetime.date, datetime.timedelta, datetime.timezone)):
            return combine(type(value).__name__, str(value))
        if isinstance(value, (decimal.Decimal, uuid.UUID)):
            return combine(type(value).__name__, str(value))
        if isinstance(value, re.Pattern):
            pattern = self.digest(value.pattern, f"{path}.pattern")
            return combine("pattern", pattern, str(value.flags))
        if is_wrapped(value):
            return combine("secret", self.digest(value.get_secret_value(), path))
        if isinstance(value, (range, slice)):
            bounds = (value.start, value.stop, value.step)
            return combine(type(value).__name__, *self._each(bounds, path))
        return None

    def _container(self, value: Any, path: str) -> str | None:
        kind = type(value)
        if kind in _CONTAINERS:
            return combine(kind.__name__, *self._items(value, path))
        if isinstance(value, types.MappingProxyType):
            return combine("mapping", *self._items(dict(value), path))
        if not isinstance(value, (*_SCALARS, *_CONTAINERS)) or hasattr(value, "model_dump"):
            return None
        base = next(item for item in (*_SCALARS, *_CONTAINERS) if isinstance(value, item))
        parts = [self._code(kind, path)]
        parts += [_scalar(value, base)] if base in _SCALARS else self._items(value, path)
        if isinstance(value, collections.defaultdict):
            parts.append(self.digest(value.default_factory, f"{path}.default_factory"))
        state = getattr(value, "__dict__", None)
        if state:
            parts += self._items(state, path, "attribute")
        return combine(f"subclass of {base.__name__}", *parts)

    def _items(self, value: Any, path: str, style: str = "item") -> list[str]:
        if isinstance(value, bytearray):
            return [value.hex()]
        if isinstance(value, dict):
            pairs = []
            for key, item in value.items():
                short = str(key) if style == "attribute" else repr(key)[:60]
                where = f"{path}.{short}" if style == "attribute" else f"{path}[{short}]"
                plain = (
                    combine("str", key) if type(key) is str else self.digest(key, f"{where} key")
                )
                pairs.append((plain, self.digest(item, where)))
            ordered = isinstance(value, collections.OrderedDict)
            return [part for pair in (pairs if ordered else sorted(pairs)) for part in pair]
        if isinstance(value, (set, frozenset)):
            return sorted(self.digest(item, f"{path}{{...}}") for item in value)
        return self._each(value, path)

    def _each(self, values: Iterable[Any], path: str) -> list[str]:
        return [self.digest(item, f"{path}[{index}]") for index, item in enumerate(values)]

    def _record(self, value: Any, path: str) -> str | None:
        kind = type(value)
        state: Mapping[str, Any] | None = None
        if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind)]
            state = {name: getattr(value, name, None) for name in names}
        elif hasattr(kind, "model_fields") and callable(getattr(value, "model_dump", None)):
            state = value.model_dump()
        elif hasattr(kind, "__attrs_attrs__"):
            state = {item.name: getattr(value, item.name) for item in kind.__attrs_attrs__}
        elif kind is types.SimpleNamespace:
            state = vars(value)
        if state is None:
            return None
        return combine("record", self._code(kind, path), *self._items(state, path, "attribute"))

    def _library(self, value: Any, path: str) -> str | None:
        """Hashes arrays, tables and frames; a library that isn't loaded can't be their type."""
        root = type(value).__module__.partition(".")[0]
        step = {
            "numpy": self._numpy,
            "pyarrow": self._pyarrow,
            "pandas": self._pandas,
            "torch": self._torch,
        }.get(root)
        library = sys.modules.get(root)
        return None if step is None or library is None else step(library, value, path)

    def _numpy(self, np: Any, value: Any, path: str) -> str | None:
        if isinstance(value, np.dtype):
            return combine("dtype", value.str if value.names is None else repr(value.descr))
        if isinstance(value, np.generic):
            return combine("scalar", self._numpy(np, value.dtype, path) or "", value.tobytes())
        if type(value) in (np.ndarray, np.memmap):
            head = (self._numpy(np, value.dtype, path) or "", repr(value.shape))
            if value.dtype.hasobject:
                return combine("array", *head, *self._each(value.ravel().tolist(), path))
            return combine("array", *head, value.tobytes())
        return combine("ufunc", value.__name__) if isinstance(value, np.ufunc) else None

    def _pyarrow(self, pa: Any, value: Any, path: str) -> str | None:
        if isinstance(value, pa.Schema):
            return combine("schema", value.serialize().to_pybytes())
        if isinstance(value, pa.Field):
            return combine("field", pa.schema([value]).serialize().to_pybytes())
        if isinstance(value, pa.DataType):
            return combine("type", pa.schema([("", value)]).serialize().to_pybytes())
        if isinstance(value, (pa.Table, pa.RecordBatch)):
            columns = [self._pyarrow(pa, column, path) or "" for column in value.columns]
            return combine("table", self._pyarrow(pa, value.schema, path) or "", *columns)
        if isinstance(value, pa.Scalar):
            kind = self._pyarrow(pa, value.type, path) or ""
            return combine("scalar", kind, self.digest(value.as_py(), path))
        if not isinstance(value, (pa.Array, pa.ChunkedArray)):
            return None
        kind = self._pyarrow(pa, value.type, path) or ""
        flat = pa.types.is_primitive(value.type) or pa.types.is_string(value.type)
        if value.null_count or not flat:
            # What lies under a null is arbitrary memory, so only the values count.
            return combine("array", kind, *self._each(value.to_pylist(), path))
        column = pa.table([value], names=[""]).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, column.schema) as writer:
            writer.write_table(column)
        return combine("array", kind, sink.getvalue().to_pybytes())

    def _pandas(self, pd: Any, value: Any, path: str) -> str | None:
        if value is pd.NA or value is pd.NaT:
            return combine("pandas", repr(value))
        if isinstance(value, (pd.Timestamp, pd.Timedelta)):
            zone = str(getattr(value, "tz", None))
            return combine(type(value).__name__, str(value.value), str(value), zone)
        if isinstance(value, pd.DataFrame):
            columns = [self.digest(value.iloc[:, at], path) for at in range(value.shape[1])]
            names = self.digest(value.columns, f"{path}.columns")
            return combine("frame", names, self.digest(value.index, f"{path}.index"), *columns)
        if isinstance(value, (pd.Series, pd.Index)):
            head = [self.digest(value.name, f"{path}.name"), str(value.dtype)]
            if isinstance(value, pd.Series):
                head.append(self.digest(value.index, f"{path}.index"))
            return combine("series", *head, *self._each(value.tolist(), path))
        return None

    def _torch(self, torch: Any, value: Any, path: str) -> str | None:
        if isinstance(value, (torch.dtype, torch.device)):
            return combine("torch", str(value))
        if not isinstance(value, torch.Tensor):
            return None
        plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        head = (str(value.dtype), repr(tuple(value.shape)))
        return combine("tensor", *head, plain.numpy().tobytes())


def _scalar(value: Any, base: type | None = None) -> str:
    kind = base or type(value)
    if kind is str:
        text = str.__str__(value)
        return _with_content("str", text, text)
    if kind is bytes:
        return combine("bytes", bytes(value))
    if kind is float:
        return combine("float", float.hex(value))
    if kind is int:
        return combine("int", hex(int(value)))
    return combine(kind.__name__, repr(value))


def _with_content(tag: str, text: str, path: str) -> str:
    """Hashes a text, and the content of the weight file or model folder that it may name."""
    content = None
    if 0 < len(path) <= _LONGEST_PATH and "\n" not in path and "\0" not in path:
        try:
            content = local_content(path)
        except (OSError, UnicodeError) as error:
            raise CodeIdentityError(
                f"{path!r} names a file or folder that cannot be read ({error}), so its content "
                f"cannot be part of the identity. Make it readable, or give `version=`."
            ) from error
    return combine(tag, text) if content is None else combine(tag, text, content)
