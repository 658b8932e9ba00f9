"""Texts of definitions: the code and the options that stored results were made by, for people.

``<root>/<pipeline>/<stage>/definitions/<definition>.json``, written by the first run that computes
something by the definition, and collected with its last manifest.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping

from vane_dagster.storage.store import Store

DEFINITIONS = "definitions"
"""The folder with the texts, below a stage's."""


def file_of(definition: str) -> str:
    """Return the name of the file with a definition's texts."""
    return f"{definition}.json"


def keep_texts(
    store: Store, pipeline: str, stage: str, definition: str, texts: Callable[[], Mapping[str, str]]
) -> None:
    """Store the texts of a definition, unless they are there."""
    folder, name = store.root.child(pipeline, stage, DEFINITIONS), file_of(definition)
    if store.keeps_code and name not in folder.names() and (by_label := texts()):
        folder.create(name, json.dumps(dict(by_label)).encode())


def read_texts(store: Store, pipeline: str, stage: str, definition: str) -> dict[str, str] | None:
    """Return the texts of a definition; None if they are not stored."""
    return store.read_record((pipeline, stage, DEFINITIONS), file_of(definition), dict)


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a unified diff of the texts of two definitions."""
    for name in {**now, **before}:
        then, today = (each.get(name, "").splitlines() for each in (before, now))
        labels = f"{name} of the stored results", name
        yield from difflib.unified_diff(then, today, *labels, n=2, lineterm="")
