"""A mark of a model's state, by which it shows whether calls have changed it."""

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
"""What reading alone moves on, and processes, which keep the modules that they have imported."""
_MOVING_NAMES = {
    ("numpy.random._generator", "Generator"),
    ("numpy.random.mtrand", "RandomState"),
    ("torch._C", "Generator"),
    ("zlib", "Compress"),
    ("zlib", "Decompress"),
}
_MOST_ITEMS = 200_000
_MOST_BYTES = 1 << 24


def state_mark(instance: Any, packages: Collection[str] = ()) -> tuple[object, ...]:
    """What an instance's attributes are: values of plain ones, and which object any other is.

    It looks into the containers of the standard library and the objects of the user's classes, as
    far as 200,000 items, and at the content of arrays and tensors. What happens inside of other
    objects, such as a library's model, it does not see. No mark is equal to that of a state with
    an iterator, an open file or a random generator. The mark refers to these objects, so that none
    of them can be freed and be mistaken for a later one.

    Args:
        instance: The model.
        packages: First parts of the names of the user's modules.
    """
    found: list[object] = []
    seen: set[int] = set()
    spare = _MOST_BYTES
    waiting: collections.deque[object] = collections.deque([vars(instance)])
    while waiting and len(found) < _MOST_ITEMS:
        value = waiting.popleft()
        kind = type(value)
        if kind in _SCALARS:
            found.append((kind, repr(value) if isinstance(value, float) else value))
            continue
        found.append(_Moving() if _moves(value) else _Same(value))
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
    """The bytes that have to be read to compare an object's content."""
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(value, numpy.ndarray)
    return int(value.nbytes) if is_array else 0  # type: ignore[attr-defined]


def _content(value: Any) -> object:
    """What is compared of a value that is changed in place."""
    if isinstance(value, bytearray):
        return bytes(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return hash(value.tobytes())
    return tensor_version(value)


class _Same:
    """Is equal to what stands for the same object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _Moving:
    """Is equal to nothing else."""
