"""Runs that read no more of a source than their stages need, with its types."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import failure, metadata
from support.typed_source import (
    ROWS,
    SOURCE_TYPES,
    source,  # noqa: F401  # fixtures
)
from vane_dagster.sources.schemas import plain_schema


def double(batch: pa.Table) -> dict[str, Any]:
    return {"double": [2 * n for n in batch["n"].to_pylist()]}


def test_columns_that_no_stage_needs_are_not_read(source, tmp_path, local, materialize):
    """By a project, by a map of the source, and below them; fragments are ranges of row groups."""
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=ROWS // 4)
    projected = docs.project("projected", {"sum": "n + m"}, where="m % 2 = 0")
    mapped = docs.map_batches("mapped", double, schema={"double": "BIGINT"}, columns=["n"])
    docs.join("joined", projected, mapped)

    result = materialize(docs, local)

    assert metadata(result, "mapped")["fragments_computed"] == 4
    joined = read_stage(tmp_path / "store", "docs", "joined")
    assert joined["id"].to_pylist() == list(range(0, ROWS, 2))
    assert joined["sum"].equals(joined["double"])

    whole = vd.Pipeline("whole", source=source, id="id")
    whole.map_batches("mapped", double, schema={"double": "BIGINT"})
    result = materialize(whole, local, raises=False)
    assert "a.parquet' cannot be read" in failure(result), "so the proof above can fail"


def test_types_are_kept_up_to_the_store(tmp_path, local, materialize):
    """Through a project of the file, one of rows in memory, a function, a join, and a filter."""
    columns = {name.replace(" ", "_"): array for name, array in SOURCE_TYPES.items()}
    written = pa.table({"id": range(3), **columns})
    file = write_source(tmp_path / "src", written)
    docs = vd.Pipeline("docs", source=vd.parquet(str(file)), id="id")
    first = docs.project("first", [*columns])
    second = first.project("second", {name: name for name in columns}, where="id > 0")
    mapped = second.map_batches("mapped", lambda b: {"n": b["id"]}, schema={"n": "BIGINT"})
    docs.join("joined", second, mapped)
    materialize(docs, local)

    schema = plain_schema(pq.read_schema(file))
    expected = pq.read_table(file).cast(schema)
    for stage, start in (("first", 0), ("second", 1), ("joined", 1)):
        found = read_stage(tmp_path / "store", "docs", stage)
        assert found.schema.field("duration").type == pa.duration("us")
        for name in columns:
            assert found.schema.field(name).type == schema.field(name).type, (stage, name)
            assert found[name].to_pylist() == expected[name].slice(start).to_pylist()
