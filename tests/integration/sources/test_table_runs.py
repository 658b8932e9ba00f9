"""Pipelines over rows in memory: what is computed again, and where a row comes from."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pyarrow as pa

import vane_dagster as vd
from support.data import read_stage
from support.results import metadata
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store

ROWS = 5_000


def rows(*added: int) -> pa.Table:
    ids = [*range(ROWS), *added]
    return pa.table({"id": ids, "text": [f"text {n}" for n in ids]})


def shout(batch: pa.Table) -> dict[str, Any]:
    return {"loud": [text.upper() for text in batch["text"].to_pylist()]}


def docs(data: Any) -> vd.Pipeline:
    pipeline = vd.Pipeline("docs", source=vd.table(data), id="id", fragment_rows=500)
    kept = pipeline.project("kept", ["text"], where="id <> 17")
    kept.map_batches("loud", shout, schema={"loud": "VARCHAR"})
    return pipeline


def test_an_added_row_recomputes_the_last_block(tmp_path, compute, materialize):
    first = metadata(materialize(docs(rows()), compute), "loud")
    assert first["fragments_computed"] == first["fragments"] > 5
    found = read_stage(tmp_path / "store", "docs", "loud")
    assert found["loud"].to_pylist() == [f"TEXT {n}" for n in range(ROWS) if n != 17]

    again = metadata(materialize(docs(rows().to_pandas()), compute), "loud")
    assert again["fragments_computed"] == 0
    grown = metadata(materialize(docs(rows(ROWS)), compute), "loud")
    assert 1 <= grown["fragments_computed"] <= 2
    assert read_stage(tmp_path / "store", "docs", "loud")["id"].to_pylist()[-1] == ROWS

    step = vd.trace("docs/loud", 4_000, store=str(tmp_path / "store")).steps[0]
    assert (step.stage, step.row) == ("docs/source", 4_000)
    assert step.url.startswith("table://")
    dropped = vd.trace("docs/source", 17, forward=True, store=str(tmp_path / "store"))
    assert (dropped.steps[0].row, "filtered" in dropped.missing["docs/kept"]) == (17, True)
    other = vd.trace(docs({"id": [1], "text": ["x"]})["loud"], 3, store=str(tmp_path / "store"))
    assert other.steps[0].row == 3


def test_the_table_does_not_travel_with_tasks(local, materialize):
    from vane_dagster.planning.source_code import pack_source

    source = vd.table({"id": range(1_000_000)})
    bound = source.bind(Store(Location("/nowhere")))
    assert len(pack_source(bound)) < 1_000


def test_an_s3_store(s3, local):
    pipeline = docs(rows())
    store = vd.FragmentStore(root="s3://lake/store", storage_options=s3)
    for computed in (True, False):
        result = dg.materialize(
            [pipeline.build_assets()], resources={"compute": local, "store": store}
        )
        assert bool(metadata(result, "loud")["fragments_computed"]) == computed
    assert vd.load("docs/loud", store=store).num_rows == ROWS - 1
