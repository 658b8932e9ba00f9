"""No row is lost, invented or there twice, whatever happens to the store."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd
from support.damage import parts
from support.data import write_source
from support.results import failure


def double(batch: pa.Table) -> pa.Table:
    return pa.table({"id": batch["id"], "y": [2 * x.as_py() for x in batch["x"]]})


def pipeline(tmp_path, rows: int = 40) -> vd.Pipeline:
    write_source(
        tmp_path / "source",
        {"id": pa.array(range(rows), pa.int64()), "x": pa.array(range(rows), pa.int64())},
        row_group_size=10,
    )
    docs = vd.Pipeline(
        "docs", source=vd.parquet(str(tmp_path / "source")), id="id", fragment_rows=10
    )
    clean = docs.project("clean", ["x"])
    clean.map_batches("double", double, schema={"y": "BIGINT"})
    return docs


def test_rows_that_vanish_from_a_part_above_are_missed(tmp_path, local, materialize):
    docs = pipeline(tmp_path)
    materialize(docs, local, select=["clean"])
    victim = parts(tmp_path, "clean")[0]
    table = pq.read_table(victim)
    pq.write_table(table.slice(0, 7), victim)
    result = materialize(docs, local, select=["double"], raises=False)
    message = failure(result)
    assert "stage 'docs/double'" in message
    assert "7 rows in of 10" in message
    assert "expected every row of 'clean'" in message
    # How many of the others were written before the partition was given up is a matter of time.
    assert {pq.read_metadata(path).num_rows for path in parts(tmp_path, "double")} <= {10}
    opened = vd.FragmentStore(root=str(tmp_path / "store")).open()
    assert opened.in_force("docs", "double", None) is None


def test_a_part_that_lost_rows_is_not_committed_by_a_later_run(tmp_path, local, materialize):
    """A part whose own counts don't add up is found by the check at the commit."""
    docs = pipeline(tmp_path)
    materialize(docs, local)
    opened = vd.FragmentStore(root=str(tmp_path / "store")).open()
    folder = opened.manifests("docs", "double", None)
    folder.delete(list(folder.names()))
    victim = parts(tmp_path, "double")[0]
    file = pq.ParquetFile(victim)
    kept = file.read().slice(0, 6).replace_schema_metadata(file.schema_arrow.metadata)
    pq.write_table(kept, victim)
    message = failure(materialize(docs, local, raises=False))
    assert "'docs/double'" in message
    assert opened.in_force("docs", "double", None) is None
