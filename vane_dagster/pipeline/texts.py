"""Code, arguments and options as texts for people: short, without secrets, the same each time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from vane_dagster._secrets import MASK, is_wrapped, marks_secret, masked

_VARYING = re.compile(r" at 0x[0-9a-f]+|(?<=<class ')(?:\w+\.)+|(?<=<)(?:\w+\.)+(?=\w+ object)")
"""Addresses in memory, and the modules of classes: that of a script has another name elsewhere."""
_MAX_LINES = 10_000
_MAX_TEXT = 1_000_000
_MAX_CHARACTERS = 10_000
_MAX_DEPTH = 8
_CONTAINERS = (Mapping, list, tuple, set, frozenset)


def texts_of(values: Mapping[str, Any], **arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return values as texts, with one line for each item of a list or dict."""
    named = [(name, name, value) for name, value in values.items()]
    for group, given in arguments.items():
        named += [(f"{group}[{name!r}]", name, value) for name, value in given.items()]
    return {
        label: masked("\n".join(islice(_lines(name, value), _MAX_LINES)))
        for label, name, value in named
    }


def _lines(name: str, value: Any, depth: int = 0) -> Iterator[str]:
    if marks_secret(name) or is_wrapped(value):
        yield MASK
    elif isinstance(value, str) and (not depth or "\n" in value):
        # A secret is masked before it is cut, into lines too.
        yield from masked(value[: 2 * _MAX_TEXT])[:_MAX_TEXT].splitlines()
    elif isinstance(value, _CONTAINERS) and value and depth < _MAX_DEPTH:
        yield from _items(value, depth + 1)
    else:
        yield from _text(value).splitlines()


def _items(value: Any, depth: int) -> Iterator[str]:
    pairs = value.items() if isinstance(value, Mapping) else (("", item) for item in value)
    if isinstance(value, (set, frozenset)):  # their order differs between processes
        pairs = (("", item) for item in sorted(value, key=_text))
    for key, item in pairs:
        name = key if isinstance(key, str) else _text(key)
        lines = [*islice(_lines(name, item, depth), _MAX_LINES)]
        head = f"{name}:" if isinstance(value, Mapping) else "-"
        if len(lines) == 1 and (lines == [MASK] or not (isinstance(item, _CONTAINERS) and item)):
            yield f"{head} {lines[0]}"
        else:
            yield head
            yield from (f"  {line}" for line in lines)


def _text(value: Any) -> str:
    """Return a value as Python writes it, without what differs between processes."""
    if isinstance(value, (str, bytes)):
        value = value[: 2 * _MAX_CHARACTERS]
    try:
        text = _VARYING.sub("", repr(value))
    except Exception:  # of a class of the user
        return f"<{type(value).__qualname__}>"
    return text if len(text) <= _MAX_CHARACTERS else masked(text)[:_MAX_CHARACTERS] + "..."
