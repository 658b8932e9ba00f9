"""Rows that name files: a row equals another one if path and version of its file are equal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import vane_dagster as vd
from support.in_process import committed, compute
from support.reused import content, contents, with_twin
from vane_dagster.planning.sample_plan import plan_sample
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.store import Store

STAGES = ["content", "contents"]


class Files:
    """Files with texts, and two stages that read them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.notes = folder / "files", folder / "notes"
        self.source.mkdir()
        self.store = Store(StoragePath(str(folder / "store")))
        monkeypatch.setenv("NOTES", str(self.notes))
        for name in "abcdef":
            self.write(name, f"text {name}")

    def write(self, name: str, text: str) -> None:
        (self.source / f"{name}.txt").write_text(text)

    def pipeline(self, fragment_rows: int) -> vd.Pipeline:
        docs = vd.Pipeline("docs", source=vd.files(f"{self.source}"), fragment_rows=fragment_rows)
        listed = docs.project("listed", ["size"])
        listed.map("content", content, reuse=vd.Reuse(version="1"))
        listed.map_batches(
            "contents",
            contents,
            columns=["path"],
            schema={"contents": "VARCHAR"},
            reuse=vd.Reuse("rows", version="1"),
        )
        return docs

    def calls(self, fragment_rows: int = 6) -> list[str]:
        """Run the pipeline, verify its rows, and return the texts that each stage has read."""
        self.notes.write_text("")
        events = compute(self.pipeline(fragment_rows), self.store)
        expected = {str(path): path.read_text() for path in self.source.iterdir()}
        for stage in STAGES:
            assert committed(events, stage)
            manifest, folder = (
                self.store.in_force("docs", stage, None),
                self.store.parts("docs", stage, None),
            )
            assert manifest is not None
            rows = [row for p in manifest.parts for row in read_part(folder, p.name).to_pylist()]
            assert {row["path"]: row[stage] for row in rows} == expected
        lines = [line.split("=") for line in self.notes.read_text().splitlines()]
        own, batches = (sorted(t for s, t in lines if s == stage) for stage in STAGES)
        assert own == batches
        return own


@pytest.fixture
def files(tmp_path, monkeypatch):
    world = Files(tmp_path, monkeypatch)
    assert len(world.calls()) == 6
    return world


@pytest.mark.parametrize(
    "written",
    [
        {"c": "other text"},
        {"c": "TEXT C"},  # of the same size
        {"c": "text a"},  # of another file: the path is part of what the function gets
        {"a": "text b", "b": "text a"},
    ],
)
def test_only_files_that_changed_are_read(files, written):
    for name, text in written.items():
        files.write(name, text)
    assert files.calls() == sorted(written.values())


def test_a_new_file_is_read_and_one_that_was_removed_or_only_touched_is_not(files):
    (files.source / "a.txt").unlink()
    os.utime(files.source / "c.txt", (1, 1))
    files.write("g", "text g")
    assert files.calls() == ["text g"]


def test_a_file_that_another_column_names_counts_too(tmp_path, monkeypatch):
    world = Files(tmp_path, monkeypatch)

    def calls() -> list[str]:
        world.notes.write_text("")
        docs = vd.Pipeline("docs", source=vd.files(f"{world.source}"))
        columns = {"path": "path", "twin": "replace(path, 'a.txt', 'b.txt')"}
        listed = docs.project("listed", columns, where="path not like '%b.txt'")
        listed.map("with_twin", with_twin, reuse=vd.Reuse(version="1"))
        compute(docs, world.store)
        return sorted(world.notes.read_text().split("\n")[:-1])

    assert len(calls()) == 5
    world.write("b", "new text")
    assert calls() == ["with_twin=new text"]
    world.write("f", "newer text")
    assert calls() == ["with_twin=newer text"]


def rewrite(file: vd.File) -> int:
    text = file.read()
    Path(file.path).write_bytes(text + b" more")
    return len(text)


def test_a_file_that_changes_while_functions_read_it_fails_the_partition(tmp_path, store):
    (tmp_path / "a.txt").write_text("text")
    raw = vd.Pipeline("raw", source=vd.files(str(tmp_path / "*.txt")))
    raw.map("counted", rewrite, on_error="quarantine")
    with pytest.raises(vd.errors.VaneError, match="was replaced after it was listed"):
        compute(raw, store)


def test_a_stage_alone_opens_the_files_that_its_input_was_made_from(tmp_path, store, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    file = tmp_path / "a.txt"
    file.write_text("text")

    def raw(version: str) -> vd.Pipeline:
        raw = vd.Pipeline("raw", source=vd.files(str(tmp_path / "*.txt")))
        listed = raw.project("listed", ["size"])
        listed.map("content", content, reuse=vd.Reuse(version=version))
        return raw

    compute(raw("1"), store, stages=["listed"])
    os.utime(file, (1, 1))
    for version in "12":  # the second time, its own manifest records the files too
        assert committed(compute(raw(version), store, stages=["content"]), "content")
    manifests = {None: store.in_force("raw", "content", None)}
    (sample,) = plan_sample(raw("3"), "content", manifests, store, {None: 1}, 0).plan.partitions
    assert [each.url for each in sample.files_of(sample.fragments[0])] == [file.as_uri()]
    file.write_text("TEXT")
    with pytest.raises(vd.errors.VaneError, match="was replaced after it was listed"):
        compute(raw("3"), store, stages=["content"])
