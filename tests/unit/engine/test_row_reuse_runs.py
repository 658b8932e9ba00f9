"""Runs after random edits of data, code and files: the rows of a plain recomputation, and no call
that an earlier run has made."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import vane_dagster as vd
from support.in_process import InProcess, compute
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.store import Store


def noted(stage: str, text: str) -> str:
    """Note a call in the file that the environment names, since workers have copies of globals."""
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{stage}={text}\n")
    if text == "bad":
        raise ValueError("bad")
    if text == "lost":
        raise ConnectionError("lost")
    return text


def upper(text: str, suffix: str = "") -> str:
    return noted("upper", text).upper() + suffix


def length(text: str) -> int:
    return len(noted("length", text))


def words(text: str) -> list[str]:
    return noted("words", text).split()


def is_long(text: str) -> bool:
    return len(noted("is_long", text)) > 2


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


@dataclass
class World:
    """What is edited.

    Attributes:
        files: The rows of each file, as id and text.
        fragment_rows: The size of fragments.
        suffix: An argument of one of the stages.
        extra: Whether an upstream stage has a column that nothing reads.
    """

    files: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    fragment_rows: int = 3
    suffix: str = ""
    extra: bool = False
    compression: str = "snappy"

    @property
    def rows(self) -> list[tuple[str, str]]:
        return [row for name in sorted(self.files) for row in self.files[name]]


class Edits(RuleBasedStateMachine):
    """Edits, each followed by a run that is compared with what it should have computed."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.ids = 0
        self.count = 0
        self.order: list[int] = [0]
        self.stored: dict[str, Counter[Any]] = {stage: Counter() for stage in STAGES}
        self.root = self.folder / f"{id(self)}-{len(list(self.folder.iterdir()))}"
        self.root.mkdir()
        self.store = Store(Location(str(self.root / "store")))

    def new_rows(self, texts: list[str]) -> list[tuple[str, str]]:
        self.ids += len(texts)
        return [(f"{self.ids - n}", text) for n, text in enumerate(texts)]

    @initialize(texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=8))
    def first_file(self, texts: list[str]) -> None:
        self.world.files["a"] = self.new_rows(texts)

    @rule(
        texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4), name=st.sampled_from("bc")
    )
    def add_a_file(self, texts: list[str], name: str) -> None:
        self.world.files[name] = self.new_rows(texts)

    @rule(data=st.data(), text=st.sampled_from(TEXTS))
    def change_a_row(self, data: Any, text: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.files)))
        place = data.draw(st.integers(0, len(self.world.files[name]) - 1))
        self.world.files[name][place] = (self.world.files[name][place][0], text)

    @rule(data=st.data(), texts=st.lists(st.sampled_from(TEXTS), max_size=3))
    def insert_rows(self, data: Any, texts: list[str]) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.files)))
        place = data.draw(st.integers(0, len(self.world.files[name])))
        self.world.files[name][place:place] = self.new_rows(texts)

    @rule(data=st.data())
    def reorder_rows(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.files)))
        self.world.files[name] = data.draw(st.permutations(self.world.files[name]))

    @rule()
    def give_all_rows_other_ids(self) -> None:
        for name, rows in self.world.files.items():
            self.world.files[name] = self.new_rows([text for _, text in rows])

    @rule()
    def merge_the_files(self) -> None:
        self.world.files = {"merged": self.world.rows}

    @rule(rows=st.integers(1, 6))
    def cut_otherwise(self, rows: int) -> None:
        self.world.fragment_rows = rows

    @rule(suffix=st.sampled_from(["", "!"]))
    def edit_an_argument(self, suffix: str) -> None:
        if suffix != self.world.suffix:
            self.stored["upper"].clear()
        self.world.suffix = suffix

    @rule()
    def add_or_remove_a_column_upstream(self) -> None:
        self.world.extra = not self.world.extra

    @rule(codec=st.sampled_from(["snappy", "zstd"]))
    def encode_otherwise(self, codec: str) -> None:
        self.world.compression = codec

    @rule(order=st.lists(st.integers(0, 5), min_size=1, max_size=5))
    def answer_in_another_order(self, order: list[int]) -> None:
        self.order = order

    def pipeline(self) -> vd.Pipeline:
        world = self.world
        docs = vd.Pipeline(
            "docs", source=vd.parquet(str(self.root / "src")), id="id",
            fragment_rows=world.fragment_rows,
        )  # fmt: skip
        clean = docs.project("clean", {"text": "text", **({"more": "1"} if world.extra else {})})
        given_: Any = {"on_error": "quarantine", "max_error_rate": 1.0, "max_retries": 0}
        clean.map("upper", upper, fn_kwargs={"suffix": world.suffix}, **given_)
        clean.map("length", length, deduplicate=True, **given_)
        clean.flat_map("words", words, id="word_id", **given_)
        clean.filter("is_long", is_long, include_columns=False, **given_)
        return docs

    def write(self) -> None:
        folder = self.root / "src"
        folder.mkdir(exist_ok=True)
        for file in folder.iterdir():
            file.unlink()
        for name, rows in self.world.files.items():
            table = pa.table({"id": [row[0] for row in rows], "text": [row[1] for row in rows]})
            pq.write_table(table, folder / f"{name}.parquet", compression=self.world.compression)

    @invariant()
    def a_run_computes_what_is_new(self) -> None:
        if not self.world.files:
            return
        self.write()
        notes = Path(os.environ["NOTES"])
        notes.write_text("")
        turns = iter(self.order * 1000)
        docs = self.pipeline()
        compute(docs, self.store, backend=InProcess(lambda count: next(turns)))
        rows = self.world.rows
        for stage in STAGES:
            found = self.found(stage)
            assert found == [e for id, t in rows for e in expected(stage, id, t, self.world.suffix)]
            wanted = Counter(text for _, text in rows)
            allowed = wanted - self.stored[stage]
            noted_calls = [line.partition("=") for line in notes.read_text().splitlines()]
            calls = Counter(text for name, _, text in noted_calls if name == stage)
            assert not calls - allowed, (stage, calls, allowed)
            if stage == "length":
                assert set(calls) == {text for text in wanted if not self.stored[stage][text]}
            lasting = {text: count for text, count in wanted.items() if text != "lost"}
            self.stored[stage] = Counter(lasting)

    def found(self, stage: str) -> list[Any]:
        manifest = self.store.in_force("docs", stage, None)
        assert manifest is not None
        folder = self.store.parts("docs", stage, None)
        rows = [row for part in manifest.parts for row in read_part(folder, part.name).to_pylist()]
        faults = sum(part.quarantined for part in manifest.parts)
        assert faults == sum(text in ("bad", "lost") for _, text in self.world.rows)
        if stage == "words":
            return [(r["id"], int(r["word_id"].rpartition("-")[2]), r["words"]) for r in rows]
        own = [] if stage == "is_long" else [stage]
        return [tuple(row[name] for name in ("id", *own)) for row in rows]


def test_random_edits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    (tmp_path / "worlds").mkdir()
    machine = type("Machine", (Edits,), {"folder": tmp_path / "worlds"})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=12, stateful_step_count=6, deadline=None)
    )
