"""A mark of a model's state, by which it shows whether calls have changed it."""

from __future__ import annotations

import collections
from typing import Any

_SCALARS = (str, bytes, int, float, complex, bool, type(None))
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_PLAIN = (*_DICTS, list, tuple, set, frozenset, collections.deque)
_MOST_ITEMS = 200_000


def state_mark(instance: Any) -> tuple[object, ...]:
    """What an instance's attributes are: values of plain ones, and which object any other is.

    It looks into the containers of the standard library, as far as 200,000 items. What happens
    inside of other objects, such as a library's model, it does not see. The mark refers to these
    objects, so that none of them can be freed and be mistaken for a later one.
    """
    found: list[object] = []
    seen: set[int] = set()
    waiting: collections.deque[object] = collections.deque([vars(instance)])
    while waiting and len(found) < _MOST_ITEMS:
        value = waiting.popleft()
        if type(value) in _SCALARS:
            found.append((type(value), repr(value) if isinstance(value, float) else value))
            continue
        found.append(_Same(value))
        if isinstance(value, bytearray):
            found.append(bytes(value))
        if type(value) not in _PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            found.append(len(value))
            waiting.extend(part for pair in value.items() for part in pair)
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            found.append(len(value))
            waiting.extend(value)
    return tuple(found)


class _Same:
    """Is equal to what stands for the same object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)
