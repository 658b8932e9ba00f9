"""The input and the function of each day, and what a run from nothing gives."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.second_day import embedder
from benchmarks.second_day.judge import TOLERANCE
from benchmarks.workloads import WORDS

PARTITIONS, POISONED = 20, 10
CHANGED, NEW = 0.02, 0.01
EDIT = ('f"passage: {text}"', 'f"query: {text}"')
"""The line of the function that is edited before the third day."""
Texts = Mapping[int, str]
Vectors = dict[int, np.ndarray]


@dataclass(frozen=True)
class Day:
    """What changed since the day before.

    Args:
        number: 1, 2 or 3.
        texts: The text of each id.
        edited: Whether the function is the edited one.
        kills: Whether a worker is killed.
    """

    number: int
    texts: Texts
    edited: bool = False
    kills: bool = False

    @property
    def keys(self) -> dict[int, str]:
        """The key of each row's id and text, by which others than ours recognize rows."""
        given = {id: f"{id} {text}".encode() for id, text in self.texts.items()}
        return {id: hashlib.blake2b(one, digest_size=16).hexdigest() for id, one in given.items()}

    @property
    def failing(self) -> set[int]:
        """The rows on which the function raises."""
        return {id for id, text in self.texts.items() if embedder.POISON in text}

    def write(self, source: Path, code: Path) -> None:
        """Replace the files of the source and the function's file."""
        keys = self.keys
        for number in range(PARTITIONS):
            ids = [id for id in self.texts if id % PARTITIONS == number]
            columns: dict[str, list[int] | list[str]] = {"id": ids}
            columns["key"] = [keys[id] for id in ids]
            columns["text"] = [self.texts[id] for id in ids]
            if self.number > 1:
                columns["author"] = [f"author {id % 7}" for id in ids]
            pq.write_table(pa.table(columns), source / f"p{number:02}.parquet")
        shutil.copy(embedder.__file__, code / "embedder.py")
        if self.edited:
            written = (code / "embedder.py").read_text()
            assert written.count(EDIT[0]) == 1
            (code / "embedder.py").write_text(written.replace(*EDIT))


def version(code: Path) -> str:
    """Return the version that a hand-written job gives its function: a hash of its file."""
    return hashlib.blake2b(code.read_bytes(), digest_size=16).hexdigest()


def three_days(rows: int) -> list[Day]:
    """Draw the texts of each day: on the second some changed and some new, one each poisoned."""
    random = np.random.default_rng(7)

    def text() -> str:
        return " ".join(random.choice(WORDS, random.integers(10, 31)))

    first = {id: text() for id in range(rows)}
    changed = random.choice(rows, max(1, round(CHANGED * rows)), replace=False).tolist()
    new = range(rows, rows + max(2, round(NEW * rows)))
    second = first | {id: text() for id in [*changed, *new]}
    for ids in (changed, new):
        second[_poisoned(ids)] += f" {embedder.POISON}"
    return [Day(1, first), Day(2, second, kills=True), Day(3, second, edited=True)]


def _poisoned(ids: Iterable[int]) -> int:
    """Choose a row in the middle partition, or close: the killed worker held one of the first."""
    return min(ids, key=lambda id: abs(id % PARTITIONS - POISONED))


def from_nothing(days: list[Day], embed: Callable[[list[str]], np.ndarray]) -> list[Vectors]:
    """Return the expected vector of each id of each day: of all texts but the poisoned.

    Args:
        days: The days.
        embed: Computes the vectors of texts, prefixes included.
    """
    known: dict[str, np.ndarray] = {}
    expected = []
    for day in days:
        prefix = EDIT[day.edited].removeprefix('f"').removesuffix('{text}"')
        failing = day.failing
        given = {id: prefix + text for id, text in day.texts.items() if id not in failing}
        missing = [text for text in given.values() if text not in known]
        if missing:
            known |= dict(zip(missing, embed(missing)))
        expected.append({id: known[text] for id, text in given.items()})
    for before, after in itertools.combinations(expected, 2):
        for id in before.keys() & after.keys():
            one, other = before[id], after[id]
            assert one is other or np.abs(one - other).max() >= 10 * TOLERANCE, id
    return expected
