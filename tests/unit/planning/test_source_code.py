"""Sources in the user's own code: what of them is keyed, and how they reach the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

import vane_dagster as vd
from vane_dagster.planning.source_code import keyed, pack_source, source_definition
from vane_dagster.sources import (
    FileRecord,
    FileSource,
    FragmentRecord,
    FragmentRule,
    SourceTable,
    fragment_record,
)
from vane_dagster.worker.source_rows import unpack_source


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


def test_a_source_comes_back_as_it_was():
    source = Lines("/data", encoding="latin-1", storage_options={"anon": True})
    back = unpack_source(pack_source(source))
    assert (back.url_for(None), back.options_for("x")) == ("/data", {"anon": True})
    assert vars(back) == vars(source)
    parquet = vd.parquet("/data", small_files="group")
    assert unpack_source(pack_source(parquet)) == parquet


def test_own_code_travels_by_value():
    payload = pack_source(Lines("/data"))
    assert __name__.encode() in payload  # as a name, in which nothing is imported
    assert b"range" in payload
    assert b"range" not in pack_source(vd.parquet("/data"))
