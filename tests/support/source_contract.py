"""The contract of a source: tests over the fixture `kept`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.sources import FragmentRule, SourceTable
from vane_dagster.sources.base import Source
from vane_dagster.sources.planned_read import read_planned
from vane_dagster.storage.manifest import FileRecord, FragmentRecord

ODD_KEYS = ["DE 3", "it's", "ä-ö", "a=b"]


@dataclass
class Kept:
    """A source with the data that tests write.

    Attributes:
        source: The source, which has partitions.
        write: Replaces the rows of a partition by rows made of numbers.
        numbers: Returns the numbers that rows were made of.
        bind: Returns a source as a run uses it.
        is_snapshot: Whether a reader still reads replaced data.
        restart: Returns the source as a process that starts now declares it.
    """

    source: Source
    write: Callable[[str, Sequence[int]], None]
    numbers: Callable[[pa.Table], list[int]]
    bind: Callable[[Source], Source] = lambda source: source
    is_snapshot: bool = False
    restart: Callable[[], Source] | None = None

    @property
    def now(self) -> Source:
        """The source as a process that starts now declares it."""
        return self.restart() if self.restart else self.source

    def listed(self, key: str) -> tuple[FileRecord, ...]:
        return self.now.required(self.now.list_files([key], "here")[key], key, "here")

    def split(self, key: str, rows: int = 4) -> SourceTable:
        return self.bind(self.now).split(self.listed(key), FragmentRule(rows), "here", key)

    def read(self, fragment: FragmentRecord, schema: pa.Schema) -> pa.Table:
        return self.bind(self.source).for_workers().read(fragment, schema, "here")

    def rows(self, key: str, rows: int = 4) -> pa.Table:
        table = self.split(key, rows)
        return pa.concat_tables(self.read(each, table.schema) for each in table.fragments)


def test_each_row_is_in_one_fragment_in_a_stable_order(kept):
    kept.write("a", range(10))
    table = kept.split("a")
    assert table == kept.split("a")
    assert all(0 < each.stop - each.start <= 4 for each in table.fragments)
    assert len({each.identity for each in table.fragments}) == len(table.fragments)
    assert kept.numbers(kept.rows("a")) == list(range(10))
    assert kept.rows("a").equals(kept.rows("a", 1000)), "the rule changes no row"


def test_partitions_are_listed_separately(kept):
    kept.write("a", range(3))
    kept.write("b", range(3, 5))
    listed = kept.now.list_files(["b", "gone", "a"], "here")
    assert set(listed) == {"a", "b", "gone"}
    assert listed["a"] == kept.listed("a")
    assert listed["b"] == kept.listed("b")
    assert kept.numbers(kept.rows("b")) == [3, 4]


def test_partitions_with_odd_names_have_their_own_rows(kept):
    for number, key in enumerate(ODD_KEYS):
        kept.write(key, [number])
    assert [kept.numbers(kept.rows(key)) for key in ODD_KEYS] == [[0], [1], [2], [3]]


def test_versions_change_with_the_content_alone(kept):
    kept.write("a", range(5))
    kept.write("b", range(5))
    files, others = kept.listed("a"), kept.listed("b")
    fragments = kept.split("a").fragments
    assert kept.listed("a") == files
    kept.write("a", range(6))
    assert kept.listed("a") != files
    assert {f.identity for f in kept.split("a").fragments} != {f.identity for f in fragments}
    if not kept.is_snapshot:
        assert kept.listed("b") == others


def test_columns_are_read_alone_and_in_any_order(kept):
    kept.write("a", range(3))
    table = kept.split("a", 1000)
    whole = pa.concat_tables(kept.read(each, table.schema) for each in table.fragments)
    for names in ([table.schema.names[-1]], table.schema.names[::-1]):
        schema = pa.schema([table.schema.field(name) for name in names])
        read = pa.concat_tables(kept.read(each, schema) for each in table.fragments)
        assert read.equals(whole.select(names))


def test_any_part_of_a_fragment_is_a_slice_of_it(kept):
    kept.write("a", range(10))
    for rows in (1000, 6):
        table = kept.split("a", rows)
        for fragment in table.fragments:
            first, count = fragment.start, fragment.stop - fragment.start
            whole = kept.read(fragment, table.schema)
            assert whole.num_rows == count
            if fragment.files or count < 3:
                continue
            for start, stop in ((0, 1), (1, count - 1), (count - 1, count)):
                part = replace(fragment, start=first + start, stop=first + stop)
                assert kept.read(part, table.schema).equals(whole.slice(start, stop - start))


def test_a_pickled_source_reads_the_same(kept):
    kept.write("a", range(5))
    table = kept.split("a", 1000)
    reader = pickle.loads(pickle.dumps(kept.bind(kept.source).for_workers()))
    for each in table.fragments:
        assert reader.read(each, table.schema, "here").equals(kept.read(each, table.schema))


def test_data_that_is_replaced_before_its_read_is_an_error(kept):
    kept.write("a", range(5))
    files, table = kept.listed("a"), kept.split("a", 1000)
    reader = kept.bind(kept.source).for_workers()
    kept.write("a", range(100, 109))

    def read() -> list[Any]:
        return [
            number
            for each in table.fragments
            for number in kept.numbers(read_planned(reader, each, table.schema, files, "here"))
        ]

    if kept.is_snapshot:
        assert read() == list(range(5))
    elif reader.reads_contents:
        words = r"was replaced after it was listed|cannot be read"
        with pytest.raises(vd.errors.SourceError, match=words):
            read()


__all__ = [name for name in dir() if name.startswith("test_")]
