"""Equal rows in several fragments of a run: computed once, whatever the order of the answers."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.in_process import InProcess, committed, compute
from support.reused import is_long, upper, words
from vane_dagster.compute.api import IO_WORKERS, CallResult, Capacity, Worker
from vane_dagster.engine import row_sharing
from vane_dagster.engine.row_sharing import FirstOwners
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.store import Store
from vane_dagster.worker import stored_rows
from vane_dagster.worker.protocol import Restore, Work

TEXTS = ["a b", "c", "long one", "", "d e f", *(f"text {n}" for n in range(8))]
OPTIONS: Any = {"deduplicate": True, "version": "1", "max_retries": 0}
QUARANTINE: Any = {**OPTIONS, "on_error": "quarantine", "max_error_rate": 1.0}


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return tmp_path / "notes"


def write(folder: Path, texts: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), folder / "a.parquet")


def docs(folder: Path, keys: list[str] | None = None, fragment_rows: int = 3) -> Any:
    """Return the rows of a pipeline, in partitions if keys are given."""
    pipeline = vd.Pipeline(
        "docs",
        source=vd.parquet(str(folder / "src" / ("{partition_key}" if keys else ""))),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(keys) if keys else None,
        fragment_rows=fragment_rows,
    )
    return pipeline, pipeline.project("clean", ["text"])


def rows(store: Store, stage: str, partition: str | None = None) -> list[dict[str, Any]]:
    manifest = store.in_force("docs", stage, partition)
    assert manifest is not None
    folder = store.parts("docs", stage, partition)
    return [row for part in manifest.parts for row in read_part(folder, part.name).to_pylist()]


class Cramped(InProcess):
    """Workers with so little memory that only the first fragments may continue."""

    def capacity(self) -> Capacity:
        return Capacity(({"CPU": 2.0},), 1, is_cluster=False)


@pytest.mark.parametrize("backend", [InProcess, Cramped])
@pytest.mark.parametrize("seed", range(4))
def test_equal_rows_of_fragments_are_computed_once_in_any_order(
    tmp_path, notes, monkeypatch, backend, seed
):
    monkeypatch.setattr(stored_rows, "_FEW", 8 * (seed % 2))
    chance = random.Random(seed)
    texts = [chance.choice(TEXTS) for _ in range(60)]
    write(tmp_path / "src", texts)
    pipeline, clean = docs(tmp_path)
    loud = clean.map("upper", upper, **QUARANTINE)
    clean.flat_map("words", words, id="word_id", **QUARANTINE)
    loud.project("loud", {"text": "upper"}).filter("is_long", is_long, **QUARANTINE)
    store = Store(Location(str(tmp_path / "store")))
    events = compute(pipeline, store, backend=backend(chance.randrange))
    calls = Counter(notes.read_text().splitlines())
    assert calls == Counter(
        {f"upper={text}": 1 for text in texts}
        | {f"words={text}": 1 for text in texts}
        | {f"is_long={text.upper()}": 1 for text in texts}
    )
    assert [row["upper"] for row in rows(store, "upper")] == [text.upper() for text in texts]
    assert [row["words"] for row in rows(store, "words")] == " ".join(texts).split()
    assert [row["id"] for row in rows(store, "is_long")] == [
        n for n, text in enumerate(texts) if len(text) > 2
    ]
    (stats,) = [each.stats for each in committed(events, "upper")]
    assert (stats.rows_in, stats.deduplicated) == (len(set(texts)), 60 - len(set(texts)))


def test_failures_are_shared_unless_they_may_pass(tmp_path, notes):
    write(tmp_path / "src", ["bad", "lost", "good"] * 4)
    pipeline, clean = docs(tmp_path)
    clean.map("upper", upper, **QUARANTINE)
    store = Store(Location(str(tmp_path / "store")))
    compute(pipeline, store)
    assert Counter(notes.read_text().splitlines()) == {
        "upper=bad": 1,
        "upper=lost": 4,
        "upper=good": 1,
    }
    manifest = store.in_force("docs", "upper", None)
    assert manifest is not None
    assert [part.quarantined for part in manifest.parts] == [2] * 4


@pytest.mark.parametrize(("partitions", "calls"), [(1, 1), (0, 3)])
def test_equal_rows_of_partitions_are_computed_once_if_they_look_in_others(
    tmp_path, notes, partitions, calls
):
    keys = ["x", "y", "z"]
    for key in keys:
        write(tmp_path / "src" / key, [f"{key} {n}" for n in range(30)] + ["same"] * 3)
    pipeline, clean = docs(tmp_path, keys)
    clean.map("upper", upper, **OPTIONS, reuse_partitions=partitions)
    store = Store(Location(str(tmp_path / "store")))
    compute(pipeline, store, keys)
    assert Counter(notes.read_text().splitlines())["upper=same"] == calls
    for key in keys:
        expected = [*(f"{key} {n}".upper() for n in range(30)), *["SAME"] * 3]
        assert [row["upper"] for row in rows(store, "upper", key)] == expected


def test_rows_of_a_partition_that_fails_are_computed_by_others(tmp_path, notes):
    texts = {"x": ["same", "same 2", "bad"], "y": ["same", "same 2", "good"] * 5}
    for key, own in texts.items():
        write(tmp_path / "src" / key, own)
    pipeline, clean = docs(tmp_path, list(texts))
    clean.map("upper", upper, **OPTIONS)
    store = Store(Location(str(tmp_path / "store")))
    with pytest.raises(vd.UdfError, match="bad"):
        compute(pipeline, store, list(texts))
    assert [row["upper"] for row in rows(store, "upper", "y")] == ["SAME", "SAME 2", "GOOD"] * 5
    calls = Counter(notes.read_text().splitlines())
    assert [calls[f"upper={text}"] for text in ("same", "same 2", "good")] == [2, 2, 1]


def test_a_row_that_fails_in_passing_is_computed_once_more_for_all(tmp_path, notes):
    write(tmp_path / "src", ["lost once"] * 30)
    pipeline, clean = docs(tmp_path)
    clean.map("upper", upper, **QUARANTINE)
    compute(pipeline, Store(Location(str(tmp_path / "store"))))
    assert notes.read_text().splitlines() == ["upper=lost once"] * 2


def test_a_resumed_run_knows_the_rows_of_the_one_that_was_stopped(tmp_path, notes):
    texts = [f"text {n % 6}" for n in range(30)]
    write(tmp_path / "src", texts)
    store = Store(Location(str(tmp_path / "store")))

    class Stopped(InProcess):
        left = 20

        def wait(self, timeout: float) -> list[CallResult]:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return super().wait(timeout)

    def run(backend: InProcess) -> tuple[int, int]:
        """Return the number of parts, and of calls."""
        notes.write_text("")
        pipeline, clean = docs(tmp_path)
        clean.map("upper", upper, **OPTIONS)
        with contextlib.suppress(KeyboardInterrupt):
            compute(pipeline, store, backend=backend)
        parts = (tmp_path / "store/docs/upper/parts").rglob("*[!s].parquet")
        return len(list(parts)), len(notes.read_text().splitlines())

    parts, calls = run(Stopped())
    assert 2 <= parts < 10, "those of all texts, and not all"
    assert calls == 6
    assert run(InProcess()) == (10, 0)
    assert [row["upper"] for row in rows(store, "upper")] == [text.upper() for text in texts]


@pytest.mark.parametrize("seed", range(4))
def test_a_stored_row_serves_one_row_of_a_stage_that_does_not_deduplicate(tmp_path, notes, seed):
    chance = random.Random(seed)
    store, stored = Store(Location(str(tmp_path / "store"))), Counter[str]()
    for size in (20, 40, 30):
        texts = [chance.choice(TEXTS[:4]) for _ in range(size)]
        ids = chance.sample(range(60), size)
        (tmp_path / "src").mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": ids, "text": texts}), tmp_path / "src" / "a.parquet")
        pipeline, clean = docs(tmp_path, fragment_rows=chance.randint(1, 6))
        clean.map("upper", upper, version="1")
        notes.write_text("")
        compute(pipeline, store, backend=InProcess(chance.randrange))
        calls = Counter(line.partition("=")[2] for line in notes.read_text().splitlines())
        assert calls == Counter(texts) - stored
        assert [row["upper"] for row in rows(store, "upper")] == [text.upper() for text in texts]
        stored = Counter(texts)


class Careless(InProcess):
    """Deletes a file of the part from which rows would be copied, the first time.

    Args:
        suffix: How the file's name ends.
    """

    def __init__(self, suffix: str) -> None:
        super().__init__()
        self.suffix, self.deleted = suffix, 0

    def run(self, worker: Worker, work: Work, tables: Any) -> int:
        if isinstance(work.op, Restore) and work.op.equal and not self.deleted:
            part = work.op.equal[0].part
            part.folder.delete([getattr(part, self.suffix)])
            self.deleted += 1
        return super().run(worker, work, tables)


@pytest.mark.parametrize("file", ["records", "part"])
def test_rows_of_a_part_that_is_gone_are_computed(tmp_path, notes, file):
    write(tmp_path / "src", [f"text {n}" for n in range(3)] * 3)
    pipeline, clean = docs(tmp_path)
    clean.map("upper", upper, **QUARANTINE)
    store = Store(Location(str(tmp_path / "store")))
    backend = Careless(file)
    compute(pipeline, store, backend=backend)
    assert backend.deleted == 1
    assert Counter(notes.read_text().splitlines()) == {f"upper=text {n}": 3 for n in range(3)}
    assert [row["upper"] for row in rows(store, "upper")] == [f"TEXT {n}" for n in range(3)] * 3


class Mortal(InProcess):
    """Loses an I/O worker at each of some random calls."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance.randrange)
        self.chance, self.left = chance, 3

    def run(self, worker: Worker, work: Work, tables: Any) -> int:
        if self.left and worker.pool == IO_WORKERS and self.chance.random() < 0.2:
            self.left -= 1
            return self._call(
                lambda ticket: CallResult(ticket, None, lost="killed", worker_lost=True)
            )
        return super().run(worker, work, tables)


@pytest.mark.parametrize("seed", range(6))
def test_fragments_that_start_over_wait_for_none(tmp_path, notes, seed):
    chance = random.Random(seed)
    texts = [chance.choice(TEXTS) for _ in range(60)]
    write(tmp_path / "src", texts)
    pipeline, clean = docs(tmp_path)
    loud = clean.map("upper", upper, **QUARANTINE).project("loud", {"text": "upper"})
    loud.map("again", upper, output_column="again", **QUARANTINE)
    store = Store(Location(str(tmp_path / "store")))
    compute(pipeline, store, backend=Mortal(chance))
    assert [row["again"] for row in rows(store, "again")] == [text.upper() for text in texts]


def test_owners_of_keys_are_those_that_came_first(monkeypatch):
    monkeypatch.setattr(row_sharing, "_IN_MEMORY", 50)
    chance = np.random.default_rng(1)
    first: dict[int, int] = {}
    owners = FirstOwners()
    for owner in range(200):
        scale = np.uint64(1) << np.uint64(int(chance.integers(0, 52)))
        keys = chance.integers(1, 2_000, size=int(chance.integers(0, 40)), dtype=np.uint64) * scale
        keys = chance.permutation(np.unique(keys))
        expected = [first.setdefault(key, owner) for key in keys.tolist()]
        assert owners.claim(keys, owner).tolist() == expected
    assert len(first) > 2_000


def test_owners_are_kept_in_memory_without_room_on_the_disk(monkeypatch):
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(row_sharing, "_IN_MEMORY", 10)
    monkeypatch.setattr(row_sharing.os, "posix_fallocate", full)
    owners = FirstOwners()
    for owner, keys in enumerate(itertools.repeat(np.arange(1, 30, dtype=np.uint64), 3)):
        assert owners.claim(keys, owner).tolist() == [0] * 29
