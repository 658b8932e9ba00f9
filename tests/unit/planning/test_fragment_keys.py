"""Keys of fragments, and of sources in user code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

import vane_dagster as vd
from support.in_process import InProcessCompute
from vane_dagster.planning.fragment_keys import fragment_keys
from vane_dagster.planning.source_code import keyed, source_definition
from vane_dagster.sources import (
    FileRecord,
    FileSource,
    FragmentRecord,
    FragmentRule,
    SourceTable,
    fragment_record,
)


def test_a_key_depends_on_definition_generation_and_every_upstream_key():
    known = {
        fragment_keys(definition, generation, [[first], [second]])
        for definition in ("new", "old")
        for generation in ("0", "1.abcdef01")
        for first in ("a", "b")
        for second in ("a", "b")
    }
    assert len(known) == 16


@dataclass(frozen=True)
class Lines(FileSource):
    """Lines of text files, with their numbers as ids."""

    kind: ClassVar[str] = "lines"
    suffix: ClassVar[str] = ".txt"
    encoding: str = "utf-8"

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        spans = [(file, 0, file.size) for file in files]
        fragments = tuple(fragment_record([span], span[0].size) for span in spans)
        return SourceTable(pa.schema([("id", pa.int64())]), fragments)

    def read(self, fragment: FragmentRecord, schema: pa.Schema, location: str) -> pa.Table:
        return pa.table({"id": range(fragment.start, fragment.stop)}, schema)


def test_sources_of_the_package_are_keyed_by_their_files_alone():
    assert source_definition(vd.parquet("/data", small_files="group")) == ""
    assert source_definition(vd.stored("a/b")) == ""
    fragments = [FragmentRecord("u", 0, 1, "i", 1)]
    assert keyed(fragments, "") == tuple(fragments)


def test_code_and_own_attributes_of_another_source_are_keyed():
    base = source_definition(Lines("/data"))
    assert base
    assert source_definition(Lines("/data", encoding="latin-1")) != base
    same = Lines("/elsewhere", asset="a", allow_empty=True, storage_options={"key": "k"})
    assert source_definition(same) == base


def test_a_version_stands_for_the_code():
    class Other(Lines):
        version = "1"

    class Same(Lines):
        version = "1"

        def read(self, fragment: FragmentRecord, schema: pa.Schema, location: str) -> pa.Table:
            return schema.empty_table()

    Same.__qualname__ = Other.__qualname__
    one, other = source_definition(Other("/data")), source_definition(Same("/data"))
    assert one == other != source_definition(Lines("/data"))


def test_the_definition_counts_in_each_fragment():
    fragments = [FragmentRecord("u", 0, 1, "i", 1), FragmentRecord("u", 1, 2, "j", 1)]
    one, other = keyed(fragments, "a"), keyed(fragments, "b")
    assert len({fragment.identity for fragment in (*fragments, *one, *other)}) == 6
    assert [(f.url, f.start, f.stop) for f in one] == [("u", 0, 1), ("u", 1, 2)]


def test_rows_are_computed_by_its_code_and_traced_by_the_pipeline_that_declares_it(tmp_path):
    place, store = tmp_path / "src" / "a.txt", str(tmp_path / "store")
    place.parent.mkdir()
    place.write_text("abcde")

    def docs(encoding: str = "utf-8") -> vd.Pipeline:
        docs = vd.Pipeline("docs", source=Lines(str(tmp_path / "src"), encoding=encoding), id="id")
        docs.project("kept", ["id"], where="id <> 2")
        return docs

    docs().run(store=store, compute=InProcessCompute())
    assert vd.load("docs/kept", store=store)["id"].to_pylist() == [0, 1, 3, 4]
    assert docs().plan(store=store).is_up_to_date
    assert docs("latin-1").plan(store=store).stages[0].fragments == 1
    step = vd.trace(docs()["kept"], 3, store=store).steps[0]
    assert (step.url, step.row) == (f"file://{place}", 3)
    step = vd.trace("docs/kept", 3, store=store).steps[0]
    assert step.row is None
    assert any("lines" in note and "stage's object" in note for note in step.notes)
