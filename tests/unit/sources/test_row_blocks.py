"""Blocks of rows by content: which rows change which blocks, and what a digest covers."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from support.typed_source import SOURCE_TYPES
from vane_dagster.sources import FragmentRule
from vane_dagster.sources.row_blocks import blocks, content_digest
from vane_dagster.sources.table_reader import in_plain_types, table_schema

ROWS = 20_000
RULE = FragmentRule(1_000)


def rows(start: int, stop: int) -> pa.Table:
    ids = range(start, stop)
    return pa.table({"id": ids, "text": [f"text {n}" for n in ids], "x": np.arange(len(ids)) / 7})


def plain(table: pa.Table) -> pa.Table:
    return in_plain_types(table, table_schema(table.schema))


def digests(*chunks: pa.Table, rule: FragmentRule = RULE) -> list[str]:
    return [block.digest for block in blocks(chunks, rule)]


def new(before: list[str], after: list[str]) -> int:
    return len(set(after) - set(before))


def test_blocks_hold_all_rows_in_order():
    table = rows(0, ROWS)
    found = list(blocks([table], RULE))
    assert pa.concat_tables(block.rows for block in found) == table
    assert [block.first for block in found] == np.cumsum(
        [0, *(len(block.rows) for block in found[:-1])]
    ).tolist()
    assert [len(block.rows) for block in found] == [RULE.rows] * (ROWS // RULE.rows)


@pytest.mark.parametrize("size", [1, 7, 999, 4_096])
def test_chunks_have_no_influence(size):
    table = rows(0, 3_000)
    chunks = [table.slice(start, size) for start in range(0, len(table), size)]
    assert digests(*chunks) == digests(table)


def test_a_change_leaves_the_blocks_before_it():
    table = rows(0, ROWS)
    before = digests(table)
    assert new(before, digests(rows(0, ROWS + 50))) == 1
    inserted = pa.concat_tables([rows(0, 5_000), rows(ROWS, ROWS + 1), rows(0, ROWS).slice(5_000)])
    assert digests(inserted)[:5] == before[:5]
    values = table["x"].to_numpy().copy()
    values[1_000:1_200] += 1  # one hundredth of the rows
    changed = table.set_column(2, "x", pa.array(values))
    assert new(before, digests(changed)) == 1


def test_rows_that_are_all_equal_have_full_blocks():
    table = pa.table({"n": np.zeros(2_500, np.int64)})
    sizes = [len(block.rows) for block in blocks([table], RULE)]
    assert sum(sizes) == 2_500
    assert max(sizes) <= 1_000


def test_large_rows_make_small_blocks():
    table = pa.table({"data": [bytes([n % 256]) * 100_000 for n in range(64)]})
    found = list(blocks([table], FragmentRule(1_000, 1 << 20)))
    assert all(block.bytes <= (1 << 20) + 100_004 for block in found)
    assert sum(len(block.rows) for block in found) == 64
    one = list(blocks([table.slice(0, 2)], FragmentRule(1_000, 10)))
    assert [len(block.rows) for block in one] == [1, 1]


@pytest.mark.parametrize("name", SOURCE_TYPES)
def test_a_digest_is_that_of_the_values(name):
    array = SOURCE_TYPES[name]
    table = plain(pa.table({"a": array}))
    moved = plain(pa.table({"a": pa.concat_arrays([array, array])})).slice(3)
    assert moved.equals(table)
    assert content_digest(moved) == content_digest(table)
    assert digests(moved) == digests(table)
    pieces = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    assert content_digest(pieces) == content_digest(table)
    if name != "null":
        assert content_digest(table.slice(1)) != content_digest(table)
        assert content_digest(table.take([1, 0, 2])) != content_digest(table)


def test_what_is_below_a_null_does_not_count():
    mask = pa.py_buffer(bytes([0b101]))
    arrays = [
        pa.Array.from_buffers(pa.int64(), 3, [mask, pa.py_buffer(np.array([1, n, 3]))])
        for n in (2, 99)
    ]
    assert arrays[0].equals(arrays[1])
    one, other = (pa.table({"a": array}) for array in arrays)
    assert content_digest(one) == content_digest(other)
    assert digests(one) == digests(other)


def test_names_types_and_the_division_of_texts_count():
    tables = [
        pa.table({"a": [1]}),
        pa.table({"b": [1]}),
        pa.table({"a": pa.array([1], pa.int32())}),
        pa.table({"a": ["ab", "c"]}),
        pa.table({"a": ["a", "bc"]}),
        pa.table({"a": [[1, 2], [3]]}),
        pa.table({"a": [[1], [2, 3]]}),
        pa.table({"a": [None, 1]}),
        pa.table({"a": [1, None]}),
        pa.table({"a": [0, 1]}),
    ]
    assert len({content_digest(table) for table in tables}) == len(tables)


def test_encodings_have_one_digest():
    values = ["a", "b", None, "a"]
    arrays = [
        pa.array(values),
        pa.array(values, pa.large_string()),
        pa.array(values, pa.string_view()),
        pa.array(values).dictionary_encode(),
        pl.Series(values).to_arrow(),
    ]
    found = {content_digest(plain(pa.table({"a": array}))) for array in arrays}
    assert len(found) == 1


def test_digests_are_frozen():
    """Stored keys contain them."""
    table = pa.table(
        {
            "id": range(3_000),
            "text": [f"text {n}" if n % 7 else None for n in range(3_000)],
            "tags": [[n] * (n % 3) for n in range(3_000)],
            "box": [{"x": n / 4, "ok": n % 2 == 0} for n in range(3_000)],
        }
    )
    assert [(block.first, block.digest) for block in blocks([table], RULE)] == FROZEN


FROZEN = [
    (0, "35318b65b312982e93d6e1c4cb5df5432aa51b21"),
    (1000, "19c9aa2c91543c9672bc62a0757a7ca88aa96a05"),
    (2000, "18c233475ff10c0dd7b7dba594391be10ac919ea"),
]
