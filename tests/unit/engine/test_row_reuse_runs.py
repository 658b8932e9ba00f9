"""Runs after random edits of data, code and files: the rows of a plain recomputation, and no call
that an earlier run has made."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.in_process import InProcess, compute
from support.reused import is_long, length, upper, words
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.store import Store
from vane_dagster.worker import stored_rows

TEXTS = ["a b", "c", "long one", "", "bad", "lost", "d e f"]
STAGES = ["upper", "length", "words", "is_long"]


def expected(stage: str, id: str, text: str, suffix: str) -> list[Any]:
    """The rows of a text, without the ids of words."""
    if text in ("bad", "lost"):
        return []
    if stage == "upper":
        return [(id, text.upper() + suffix)]
    if stage == "length":
        return [(id, len(text))]
    if stage == "words":
        return [(id, n, word) for n, word in enumerate(text.split())]
    return [(id,)] if len(text) > 2 else []


class World:
    """Files, and a pipeline over them, both of which are edited at random.

    Args:
        folder: Where they are, with the store.
        seed: Determines all edits.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.store = Store(Location(str(folder / "store")))
        self.ids = 0
        self.fragment_rows = 3
        self.suffix = ""
        self.compression = "snappy"
        self.extra = False
        self.retry = False
        self.files = {"a": self.new_rows(8)}
        self.stored: dict[str, Counter[Any]] = {stage: Counter() for stage in STAGES}

    def new_rows(self, count: int) -> list[tuple[str, str]]:
        self.ids += count
        return [(f"{self.ids - n}", self.random.choice(TEXTS)) for n in range(count)]

    @property
    def rows(self) -> list[tuple[str, str]]:
        return [row for name in sorted(self.files) for row in self.files[name]]

    def edit(self) -> str:
        """Edit something, and return what."""
        edits = [name for name in dir(self) if name.startswith("edit_")]
        name = self.random.choice(edits)
        getattr(self, name)()
        return name

    def any_file(self) -> list[tuple[str, str]]:
        return self.files[self.random.choice(sorted(self.files))]

    def edit_a_row(self) -> None:
        rows = self.any_file()
        place = self.random.randrange(len(rows))
        rows[place] = (rows[place][0], self.random.choice(TEXTS))

    def edit_by_a_new_file(self) -> None:
        self.files[self.random.choice("bc")] = self.new_rows(self.random.randint(1, 4))

    def edit_by_inserting(self) -> None:
        rows = self.any_file()
        place = self.random.randrange(len(rows) + 1)
        rows[place:place] = self.new_rows(self.random.randint(0, 3))

    def edit_by_removing(self) -> None:
        rows = self.any_file()
        if len(rows) > 1:
            del rows[self.random.randrange(len(rows))]

    def edit_the_order(self) -> None:
        self.random.shuffle(self.any_file())

    def edit_all_ids(self) -> None:
        for name, rows in self.files.items():
            texts = [text for _, text in rows]
            ids = [id for id, _ in self.new_rows(len(rows))]
            self.files[name] = list(zip(ids, texts))

    def edit_by_merging(self) -> None:
        self.files = {"merged": self.rows}

    def edit_by_moving(self) -> None:
        self.files = {f"{name}x"[-9:]: rows for name, rows in self.files.items()}

    def edit_the_fragments(self) -> None:
        self.fragment_rows = self.random.randint(1, 6)

    def edit_an_argument(self) -> None:
        self.suffix = self.suffix + "!"
        self.stored["upper"].clear()

    def edit_upstream(self) -> None:
        self.extra = not self.extra

    def edit_the_encoding(self) -> None:
        self.compression = "zstd" if self.compression == "snappy" else "snappy"

    def edit_nothing_but_retry(self) -> None:
        self.retry = True

    def pipeline(self) -> vd.Pipeline:
        docs = vd.Pipeline(
            "docs", source=vd.parquet(str(self.folder / "src")), id="id",
            fragment_rows=self.fragment_rows,
        )  # fmt: skip
        clean = docs.project("clean", {"text": "text", **({"more": "1"} if self.extra else {})})
        failures = vd.Failures("quarantine", max_error_rate=1.0, max_retries=0)
        given_: Any = {"on_error": failures, "reuse": vd.Reuse(version="1")}
        own = {**given_, "reuse": vd.Reuse(version="1", per_row=True)}
        clean.map("upper", upper, fn_kwargs={"suffix": self.suffix}, **given_)
        clean.map("length", length, **own)
        clean.flat_map("words", words, id="word_id", **given_)
        clean.filter("is_long", is_long, include_columns=False, **given_)
        return docs

    def write(self) -> None:
        folder = self.folder / "src"
        folder.mkdir(exist_ok=True)
        for file in folder.iterdir():
            file.unlink()
        for name, rows in self.files.items():
            table = pa.table({"id": [row[0] for row in rows], "text": [row[1] for row in rows]})
            pq.write_table(table, folder / f"{name}.parquet", compression=self.compression)

    def run(self) -> None:
        """Write the files and run the pipeline; compare with what it should have computed."""
        self.write()
        notes = Path(os.environ["NOTES"])
        notes.write_text("")
        backend = InProcess(self.random.randrange)
        options = {"retry_quarantined": self.retry}
        compute(self.pipeline(), self.store, backend=backend, **options)
        lines = [line.partition("=") for line in notes.read_text().splitlines()]
        wanted = Counter(text for _, text in self.rows)
        for stage in STAGES:
            made = [e for id, text in self.rows for e in expected(stage, id, text, self.suffix)]
            assert self.found(stage) == made, stage
            stored = self.stored[stage]
            if self.retry:
                stored = Counter(key for key in stored if "bad" not in key)
            allowed = Counter(text for text in wanted if not stored[text])
            if stage == "length":  # each row has its own result
                allowed = Counter(text for id, text in self.rows if not stored[id, text])
            calls = Counter(text for name, _, text in lines if name == stage)
            # A worker that fails at several fragments in a row is replaced, and its call repeated.
            for text in {*calls, *allowed}:
                lasts = text not in ("bad", "lost")
                fewest = most = allowed[text]
                if stage != "length" and allowed[text]:
                    fewest, most = 1, wanted[text]
                if not lasts and allowed[text]:
                    fewest, most = 0, 99
                assert fewest <= calls[text] <= most, (stage, calls, allowed)
            lasting = [(id, text) for id, text in self.rows if text != "lost"]
            self.stored[stage] = Counter(lasting if stage == "length" else [t for _, t in lasting])
        self.retry = False

    def found(self, stage: str) -> list[Any]:
        manifest = self.store.in_force("docs", stage, None)
        assert manifest is not None
        folder = self.store.parts("docs", stage, None)
        rows = [row for part in manifest.parts for row in read_part(folder, part.name).to_pylist()]
        failed = sum(text in ("bad", "lost") for _, text in self.rows)
        assert sum(part.quarantined for part in manifest.parts) == failed
        assert sum(part.rows_in for part in manifest.parts) == len(self.rows)
        if stage == "words":
            return [(r["id"], int(r["word_id"].rpartition("-")[2]), r["words"]) for r in rows]
        own = [] if stage == "is_long" else [stage]
        return [tuple(row[name] for name in ("id", *own)) for row in rows]


@pytest.mark.parametrize("seed", range(4))
def test_random_edits(tmp_path, monkeypatch, seed):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    if seed % 2:
        monkeypatch.setattr(stored_rows, "_FEW", 0)  # each copy is of few rows
    world, history = World(tmp_path, seed), []
    world.run()
    for _ in range(12):
        history.append(world.edit())
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"after {history}: {error}") from error
