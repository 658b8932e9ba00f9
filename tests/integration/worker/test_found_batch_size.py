"""A run whose worker finds its batch size."""

from __future__ import annotations

import pyarrow as pa

import vane_dagster as vd
from support.data import read_stage, write_source
from support.devices import Device
from support.results import metadata


def test_a_run_shows_the_size_and_keeps_its_results(tmp_path, local, materialize):
    count = 40_000
    write_source(tmp_path / "source", {"id": pa.array(range(count), pa.int64())})
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "source")), id="id")
    docs.map_batches("sized", Device, schema={"size": "BIGINT"}, batch_size="auto")
    result = materialize(docs, local)
    table = read_stage(tmp_path / "store", "docs", "sized")
    assert table["id"].to_pylist() == list(range(count))
    sizes = table["size"].to_pylist()
    assert sizes[0] == 16
    assert max(sizes) >= 256
    assert metadata(result, "sized").get("batch_size", 256) >= 256
