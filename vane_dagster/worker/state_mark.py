"""A fingerprint of a model's state, to detect whether calls have changed it."""

from __future__ import annotations

import codecs
import collections
import queue
import random
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.pool import Pool, ThreadPool
from types import BuiltinMethodType, MethodType, MethodWrapperType
from typing import Any

from vane_dagster.worker.frameworks import tensor_version

_SCALARS = (str, bytes, int, float, complex, bool, type(None))
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_PLAIN = (*_DICTS, list, tuple, set, frozenset, collections.deque)
_METHODS = (BuiltinMethodType, MethodType, MethodWrapperType)
_CODECS = (codecs.IncrementalDecoder, codecs.IncrementalEncoder)
_PROCESSES = (ProcessPoolExecutor, Pool)
_MOVING = (Iterator, random.Random, queue.Queue, queue.SimpleQueue, *_CODECS, *_PROCESSES)
"""Objects that change when read, and processes, which keep the modules that they have imported."""
_MOVING_NAMES = {
    ("numpy.random._generator", "Generator"),
    ("numpy.random.mtrand", "RandomState"),
    ("torch._C", "Generator"),
    ("zlib", "Compress"),
    ("zlib", "Decompress"),
}
_MAX_ITEMS = 200_000
_MAX_BYTES = 1 << 24


def state_fingerprint(instance: Any, packages: Collection[str] = ()) -> tuple[object, ...]:
    """Fingerprint an instance's attributes: plain ones by value, all others by object identity.

    It covers the content of standard containers and of objects of the user's classes, up to 200,000
    items, and the content of arrays and tensors. It does not detect changes inside other objects,
    such as a library's model. The fingerprint of a state with an iterator, an open file or a random
    generator never equals another. The fingerprint refers to these objects, so none of them can be
    freed and mistaken for a later one.

    Args:
        instance: The model.
        packages: First parts of the names of the user's modules.
    """
    found: list[object] = []
    seen: set[int] = set()
    spare = _MAX_BYTES
    waiting: collections.deque[object] = collections.deque([vars(instance)])
    while waiting and len(found) < _MAX_ITEMS:
        value = waiting.popleft()
        kind = type(value)
        if kind in _SCALARS:
            found.append((kind, repr(value) if isinstance(value, float) else value))
            continue
        found.append(_NeverEqual() if _moves(value) else _SameObject(value))
        if id(value) in seen:
            continue
        seen.add(id(value))
        if (size := _size(value)) <= spare:
            spare -= size
            found.append(_content(value))
        if isinstance(value, dict) and kind in _PLAIN:
            found.append(len(value))
            waiting.extend(part for pair in value.items() for part in pair)
            waiting.append(getattr(value, "default_factory", None))
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)) and kind in _PLAIN:
            found.append(len(value))
            waiting.extend(value)
        elif isinstance(value, _METHODS):
            waiting.append(value.__self__)
        elif isinstance(value, partial):
            waiting.extend((value.func, value.args, value.keywords))
        elif kind.__module__.partition(".")[0] in packages:
            waiting.append(getattr(value, "__dict__", None))
    return tuple(found)


def _moves(value: object) -> bool:
    kind = type(value)
    named = (kind.__module__, kind.__qualname__) in _MOVING_NAMES
    return named or (isinstance(value, _MOVING) and not isinstance(value, ThreadPool))


def _size(value: object) -> int:
    """Return the bytes to read to compare an object's content."""
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(value, numpy.ndarray)
    # An array has the attribute; `is_array` is no type guard.
    return int(value.nbytes) if is_array else 0  # type: ignore[attr-defined]


def _content(value: Any) -> object:
    """Return the value that is compared for an object that can change in place."""
    if isinstance(value, bytearray):
        return bytes(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return hash(value.tobytes())
    return tensor_version(value)


class _SameObject:
    """A reference that equals any other reference to the same object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _NeverEqual:
    """A marker that equals nothing else."""
