"""The benchmark of the day after: its days, and the judge of outputs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from benchmarks.second_day.days import EDIT, Vectors, from_nothing, three_days
from benchmarks.second_day.embedder import POISON
from benchmarks.second_day.judge import judge

YESTERDAY: Vectors = {id: np.full(4, id, np.float32) for id in range(4)}
TODAY: Vectors = YESTERDAY | {3: np.full(4, 33, np.float32), 4: np.full(4, 4, np.float32)}
RIGHT = [(id, vector.tolist()) for id, vector in TODAY.items()]


def output(rows: list[tuple[int, list[float] | None]]) -> pa.Table:
    vectors = pa.array([vector for _, vector in rows], pa.list_(pa.float32(), 4))
    return pa.table({"id": pa.array([id for id, _ in rows], pa.int64()), "embedding": vectors})


@pytest.mark.parametrize(
    ("rows", "counts"),
    [
        (RIGHT, {"right": 5}),
        (RIGHT[::-1], {"right": 5}),
        ([*RIGHT, (9, None)], {"right": 5}),
        ([*RIGHT, (8, None)], {"right": 5, "wrong": 1}),
        ([], {"missing": 5}),
        (RIGHT[1:], {"right": 4, "missing": 1}),
        ([(0, None), *RIGHT[1:]], {"right": 4, "missing": 1}),
        ([*RIGHT[:3], (3, [3.0] * 4), RIGHT[4]], {"right": 4, "stale": 1}),
        ([*RIGHT, (3, [3.0] * 4)], {"right": 5, "stale": 1, "twice": 1}),
        ([*RIGHT, RIGHT[0]], {"right": 5, "twice": 1}),
        ([*RIGHT[:4], (4, [3.9] * 4)], {"right": 4, "wrong": 1}),
        ([*RIGHT, (9, [9.0] * 4)], {"right": 5, "wrong": 1}),
        ([(1, [0.0] * 4), (0, [1.0] * 4), *RIGHT[2:]], {"right": 3, "wrong": 2}),
        ([*RIGHT[:4], (4, [float("nan")] * 4)], {"right": 4, "wrong": 1}),
    ],
)
def test_rows_are_judged(rows: list[tuple[int, list[float] | None]], counts: dict) -> None:
    verdict = judge(output(rows), TODAY, [YESTERDAY], failing={9})
    nothing = dict.fromkeys(("right", "missing", "stale", "wrong", "twice"), 0)
    assert asdict(verdict) == {"expected": 5, **nothing, **counts}
    assert verdict.equal == (counts == {"right": 5})


def test_the_second_day_has_changed_new_and_poisoned_rows(tmp_path: Path) -> None:
    days = three_days(1000)
    first, second = (day.texts for day in days[:2])
    assert sum(first[id] != second[id] for id in first) == 20
    assert len(second.keys() - first.keys()) == 10
    new, changed = sorted(days[1].failing, reverse=True)
    assert new >= 1000 > changed
    assert new % 20 == changed % 20 == 9
    before, after = (day.keys for day in days[:2])
    assert len(set(after.values())) == 1010
    assert {id for id in first if before[id] != after[id]} == {
        id for id in first if first[id] != second[id]
    }
    assert [(day.kills, day.edited) for day in days] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    for day, columns in zip(days, (["id", "key", "text"], ["id", "key", "text", "author"])):
        source, code = tmp_path / f"in{day.number}", tmp_path / f"code{day.number}"
        source.mkdir()
        code.mkdir()
        day.write(source, code)
        table = ds.dataset(source).to_table()
        assert table.column_names == columns
        assert dict(zip(*(table[name].to_pylist() for name in ("id", "text")))) == day.texts
        assert len(list(source.iterdir())) == 20


def test_one_line_is_edited_on_the_third_day(tmp_path: Path) -> None:
    for day in three_days(40):
        day.write(tmp_path, tmp_path)
        lines = (tmp_path / "embedder.py").read_text().splitlines()
        if day.number == 2:
            before = lines
    assert [pair for pair in zip(before, lines) if pair[0] != pair[1]] == [
        tuple(f"    return {prompt}" for prompt in EDIT)
    ]


def test_a_run_from_nothing_uses_the_function_of_the_day() -> None:
    days = three_days(40)
    given: list[str] = []

    def embed(texts: list[str]) -> np.ndarray:
        given.extend(texts)
        return np.arange(len(given) - len(texts), len(given))

    expected = from_nothing(days, embed)
    for day, prefix, vectors in zip(days, ("passage: ", "passage: ", "query: "), expected):
        texts = {id: prefix + text for id, text in day.texts.items() if POISON not in text}
        assert {id: given[int(place)] for id, place in vectors.items()} == texts
    with pytest.raises(AssertionError):  # a stale vector could not be told from a right one
        from_nothing(days, lambda texts: np.full((len(texts), 4), 0.5))
