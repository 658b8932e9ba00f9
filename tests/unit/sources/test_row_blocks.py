"""Blocks of rows by content: which rows change which blocks, and what a digest covers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from vane_dagster.sources.row_blocks import BLOCK_ROWS, blocks

ROWS = 20_000


def rows(start: int, stop: int) -> pa.Table:
    ids = range(start, stop)
    return pa.table({"id": ids, "text": [f"text {n}" for n in ids], "x": np.arange(len(ids)) / 7})


def digests(*chunks: pa.Table) -> list[str]:
    return [block.identity for block, _ in blocks(chunks)]


def content_digest(table: pa.Table) -> str:
    (found,) = digests(table)
    return found


def new(before: list[str], after: list[str]) -> int:
    return len(set(after) - set(before))


def test_blocks_hold_all_rows_in_order():
    table = rows(0, ROWS)
    found = list(blocks([table]))
    assert pa.concat_tables(part for _, part in found) == table
    assert [block.rows for block, _ in found] == [len(part) for _, part in found]
    whole, rest = divmod(ROWS, BLOCK_ROWS)
    assert [block.rows for block, _ in found] == [BLOCK_ROWS] * whole + [rest]


def test_a_change_leaves_the_blocks_before_it():
    table = rows(0, ROWS)
    before = digests(table)
    assert new(before, digests(rows(0, ROWS + 50))) == 1
    inserted = pa.concat_tables([rows(0, 5_200), rows(ROWS, ROWS + 1), rows(0, ROWS).slice(5_200)])
    assert digests(inserted)[:5] == before[:5]
    values = table["x"].to_numpy().copy()
    values[1_024:1_224] += 1  # one hundredth of the rows
    changed = table.set_column(2, "x", pa.array(values))
    assert new(before, digests(changed)) == 1


def test_equal_blocks_are_different_rows():
    table = pa.table({"n": np.zeros(2_500, np.int64)})
    found = digests(table)
    assert len(set(found)) == 3
    assert found[1] == f"{found[0]}~1"


def test_large_rows_make_small_blocks():
    table = pa.table({"data": [bytes([n % 256]) * (1 << 20) for n in range(64)]})
    found = [block for block, _ in blocks([table])]
    assert [block.rows for block in found] == [4] * 16  # with their sizes, 8 are too large
    larger = pa.table({"data": [b"a" * (9 << 20), b"b" * (9 << 20)]})
    assert [block.rows for block, _ in blocks([larger])] == [1, 1]
    # The other blocks stay when one row becomes larger.
    grown = table.to_pylist()
    grown[5] = {"data": b"x" * (6 << 20)}
    assert new([block.identity for block in found], digests(pa.Table.from_pylist(grown))) <= 2


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


def test_digests_are_frozen():
    """Stored keys contain them."""
    table = pa.table(
        {
            "id": range(3_000),
            "text": [f"text {n}" if n % 7 else None for n in range(3_000)],
            "tags": [[n] * (n % 3) for n in range(3_000)],
            "box": pa.array(
                [{"x": n / 4, "ok": n % 2 == 0} for n in range(3_000)],
                pa.struct({"x": pa.float64(), "ok": pa.bool_()}),
            ),
        }
    )
    assert digests(table) == FROZEN_BLOCKS


FROZEN_BLOCKS = [
    "354bda24373a149f9e0915a790f792aa0084c14a",
    "779bff6912c1ab2b6c7f06f257ac3435e018e1b2",
    "57a42c01931f1d910e6b0a06430e2c140c3219dc",
]
