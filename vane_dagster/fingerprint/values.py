"""Digests that are the same in every process; what pickle cannot write is refused, by its path."""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from vane_dagster._secrets import is_wrapped
from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import combine
from vane_dagster.fingerprint.local_file import LocalFile
from vane_dagster.servers.handle import HostUrls, ServerHandle

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
_CONTAINERS = (dict, list, tuple, set, frozenset)
_PLAIN_MODULES = frozenset({*sys.stdlib_module_names, "numpy", "pandas", "pyarrow"})
_BYTES = (bytes, bytearray, memoryview)


class ValueEncoder:
    """Hashes values; the `code` callable hashes functions, classes and modules."""

    def __init__(self, code: Callable[[Any, str], str], files: LocalFiles | None = None) -> None:
        self._code = code
        self._files = files or LocalFiles()
        # With `version=`, which replaces content, an object counts by its type.
        self._strict = self._files.read
        self._open: set[int] = set()
        self._done: dict[int, tuple[str, Any]] = {}  # with the values, so that ids stay theirs

    def digest(self, value: Any, path: str) -> str:
        """Hash a value."""
        if value is None:
            return combine("None")
        kind = type(value)
        if kind in _SCALARS:
            return self._scalar(value, path)
        try:
            return self._object(value, path)
        except CodeIdentityError:
            raise
        except Exception as error:
            if not self._strict:
                return combine("opaque", kind.__module__, kind.__qualname__)
            reason = f"that cannot be read for pickle ({type(error).__name__})"
            raise _unstable(value, path, reason) from error

    def _object(self, value: Any, path: str) -> str:
        if isinstance(value, _CODE):
            return self._code(value, path)
        if id(value) in self._open:
            raise _unstable(value, path, "that refers back to itself")
        if id(value) in self._done:
            return self._done[id(value)][0]
        self._open.add(id(value))
        try:
            self._done[id(value)] = self._compound(value, path), value
        finally:
            self._open.discard(id(value))
        return self._done[id(value)][0]

    def _compound(self, value: Any, path: str) -> str:
        for step in (self._array, self._standard, self._container):
            encoded = step(value, path)
            if encoded is not None:
                return encoded
        if hasattr(value, "__wrapped__") and callable(value):
            return self._code(value, path)
        kind = type(value)
        if not self._strict and not _is_plain(kind):
            return combine("opaque", kind.__module__, kind.__qualname__)
        return combine("object", *self._reduced(value, path))

    def _scalar(self, value: Any, path: str) -> str:
        if isinstance(value, str):
            return self._with_content("str", value, value, path)
        return combine(type(value).__name__, ast_digest.constant_text(value))

    def _with_content(self, tag: str, text: str, named: str | os.PathLike[str], path: str) -> str:
        """Hash a string, and the content of the file or folder that it may name."""
        content = self._files.content(named, path)
        return combine(tag, text) if content is None else combine(tag, text, content)

    def _standard(self, value: Any, path: str) -> str | None:
        if isinstance(value, LocalFile):
            return combine("local file", value.identity() if self._strict else value.name)
        if isinstance(value, ServerHandle):
            return combine("server", self.digest(value.keyed, path))
        if isinstance(value, HostUrls):
            return combine("server urls", value.kind, self.digest(value.handle, path))
        if isinstance(value, enum.Enum):  # its class may hold it
            named = ("" if isinstance(value, enum.Flag) else value.name, value.value)
            return combine("enum", self._code(type(value), path), *self._each(named, path))
        if isinstance(value, pathlib.PurePath):
            kind = self._code(type(value), path)
            return self._with_content(kind, value.as_posix(), value, path)
        if is_wrapped(value):
            return combine("secret", self.digest(value.get_secret_value(), path))
        return None

    def _container(self, value: Any, path: str) -> str | None:
        kind = type(value)
        if kind is types.MappingProxyType:
            return combine("mapping", *self._items(dict(value), path))
        return combine(kind.__name__, *self._items(value, path)) if kind in _CONTAINERS else None

    def _items(self, value: Any, path: str) -> list[str]:
        """Hash a container's items in their order, because the order can change a result."""
        if isinstance(value, dict):
            parts = []
            for key, item in dict.items(value):
                where = f"{path}[{repr(key)[:60]}]"
                parts += [self.digest(key, f"{where} key"), self.digest(item, where)]
            return parts
        if isinstance(value, (set, frozenset)):
            return sorted(self.digest(item, f"{path}{{...}}") for item in value)
        return self._each(value, path)

    def _each(self, values: Iterable[Any], path: str) -> list[str]:
        return [self.digest(item, f"{path}[{index}]") for index, item in enumerate(values)]

    def _reduced(self, value: Any, path: str) -> list[str]:
        """Hash an object by its class's code and by what pickle writes of it."""
        kind = type(value)
        reduce = copyreg.dispatch_table.get(kind)
        reduced: Any = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            module = sys.modules.get(getattr(value, "__module__", kind.__module__))
            if module is not None and getattr(module, reduced, None) is value:
                return [self._code(module, path), reduced]
            raise _unstable(value, path, f"that is pickled by the name {reduced!r}")
        make, arguments, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
        if getattr(kind, "__reduce__", None) in (set.__reduce__, frozenset.__reduce__):
            arguments = frozenset(value)  # a list of them has an order of the process
        written = (*arguments, state, *(state if isinstance(state, tuple) else ()))
        if not _is_plain(kind) and any(isinstance(part, _BYTES) for part in written):
            reason = "that is pickled as bytes, which may refer to code of yours"
            raise _unstable(value, path, reason)
        listed = (None if items is None else list(items), None if pairs is None else dict(pairs))
        parts = (make, arguments, *listed, setter)
        digests = [self._code(kind, path), *(self.digest(part, path) for part in parts)]
        if kind.__module__.startswith("pandas"):
            state = _without_cache(state)
        if type(state) is dict and all(type(name) is str for name in state):
            return [
                *digests,
                *(combine(each, self.digest(state[each], f"{path}.{each}")) for each in state),
            ]
        return [*digests, self.digest(state, path)]

    def _array(self, value: Any, path: str) -> str | None:
        """Hash a value of a library for arrays and tables.

        A subclass defined by a user or another library is not included, because it may hold more.
        """
        root = type(value).__module__.partition(".")[0]
        steps = {"numpy": self._numpy, "pyarrow": self._pyarrow, "torch": self._torch}
        library = sys.modules.get(root)
        return steps[root](library, value, path) if root in steps and library is not None else None

    def _numpy(self, np: Any, value: Any, path: str) -> str | None:
        kind = type(value)
        if isinstance(value, np.generic):
            content = self._buffer(np, np.asarray(value), path)
            return combine("scalar", self.digest(value.dtype, path), content)
        if kind in (np.ndarray, np.memmap):
            head = (self.digest(value.dtype, path), repr(value.shape))
            return combine("array", *head, self._buffer(np, value, path))
        return None

    def _buffer(self, np: Any, value: Any, path: str) -> str:
        """Hash an array's elements, ignoring the memory between them."""
        dtype = value.dtype
        if dtype.names is not None:
            return combine("fields", *(self._buffer(np, value[n], path) for n in dtype.names))
        if dtype.hasobject or dtype.kind in "TU":  # texts may name files
            return combine("objects", *self._each(value.ravel().tolist(), path))
        if dtype.char in "gG":  # some bytes of a long double are padding
            raise CodeIdentityError(f"{path} is an array of {dtype}. Pass it as float64.")
        return combine("bytes", np.ascontiguousarray(value).tobytes())

    def _pyarrow(self, pa: Any, value: Any, path: str) -> str | None:
        if not isinstance(value, (pa.Array, pa.ChunkedArray)):
            return None
        kind = self.digest(value.type, path)
        return combine("array", kind, self._elements(pa, value, path))

    def _elements(self, pa: Any, value: Any, path: str) -> str:
        """Hash a column's elements, independent of its chunks."""
        if isinstance(value, pa.ChunkedArray):
            if pa.types.is_dictionary(value.type):
                value = value.unify_dictionaries()
            value = value.combine_chunks()
        if pa.types.is_dictionary(value.type):
            parts = (value.indices, value.dictionary)
            return combine("dictionary", *(self._elements(pa, part, path) for part in parts))
        is_flat = pa.types.is_primitive(value.type) and value.type.bit_width <= 64
        if is_flat and not value.null_count:
            return self.digest(value.to_numpy(zero_copy_only=False), path)
        # The memory of a null slot is arbitrary, so only the values count.
        return combine("values", *self._each(value.to_pylist(), path))

    def _torch(self, torch: Any, value: Any, path: str) -> str | None:
        is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not is_plain or value.is_quantized:
            return None
        head = (
            type(value).__name__,
            str(value.dtype),
            repr(tuple(value.shape)),
            str(value.requires_grad),
            value.device.type,
        )
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return combine("tensor", *head, plain.view(torch.uint8).numpy().tobytes())


def _without_cache(state: Any) -> Any:
    """Return the state of an object of pandas without what was computed of it before."""
    if isinstance(state, tuple):
        parts = map(_without_cache, state)
        return tuple(part for part in parts if not isinstance(part, dict) or part)
    if isinstance(state, dict):
        return {name: item for name, item in state.items() if name != "_cache"}
    return state


def _unstable(value: object, path: str, reason: str) -> CodeIdentityError:
    kind = type(value)
    return CodeIdentityError(
        f"{path} is a {kind.__module__}.{kind.__qualname__} {reason}, so it has no stable "
        f"identity. Pass plain values and build the object inside the class, or give the stage "
        f"`vd.Reuse(version=...)`."
    )


def _is_plain(kind: type) -> bool:
    """Return whether all that objects of a class hold is known, so they count beside a version."""
    return (
        kind.__module__.partition(".")[0] in _PLAIN_MODULES
        or issubclass(kind, (*_SCALARS, *_CONTAINERS))
        or dataclasses.is_dataclass(kind)
        or any(hasattr(kind, name) for name in ("model_fields", "__attrs_attrs__"))
    )
