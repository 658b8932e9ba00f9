"""A model that a function loads on its own, and keeps in its worker."""

from __future__ import annotations

import functools
from pathlib import Path

import vane_dagster as vd
from support.data import read_stage, write_source


@functools.lru_cache
def load_offset(path: str) -> int:
    return int(Path(path).read_text())


def shifted(batch, path):
    return {"shifted": [n + load_offset(path) for n in batch["id"].to_pylist()]}


def test_file_that_changed_is_loaded_again_by_warm_workers(tmp_path, cluster, materialize):
    model = tmp_path / "model.txt"
    write_source(tmp_path / "src", {"id": [1, 2, 3]})
    results = []
    for offset in ("10", "200", "10"):
        model.write_text(offset)
        pipeline = vd.Pipeline("cached", source=vd.parquet(str(tmp_path / "src")), id="id")
        pipeline.map_batches(
            "moved", shifted, schema={"shifted": "BIGINT"}, fn_kwargs={"path": str(model)}
        )
        materialize(pipeline, vd.RayCompute(cluster=cluster))
        results.append(read_stage(tmp_path / "store", "cached", "moved")["shifted"].to_pylist())
    assert results == [[11, 12, 13], [201, 202, 203], [11, 12, 13]]
