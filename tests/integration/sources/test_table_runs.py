"""Pipelines over rows in memory: what is computed again, and where a row comes from."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa

import vane_dagster as vd
from support.data import read_stage
from support.results import metadata
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.gc import GcPolicy, collect
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


def test_a_collection_keeps_what_the_manifest_in_force_was_made_from(tmp_path, local, materialize):
    materialize(docs(rows(ROWS)), local)
    materialize(docs(rows(ROWS, ROWS + 1)), local)
    store = Store(Location(str(tmp_path / "store")))
    folder = store.root.child("~tables", "made")
    assert len(folder.entries()) == 2
    reports = list(collect(store, GcPolicy(time.time() + 30 * 86_400, 86_400, 86_400)))
    (tables,) = (report for report in reports if report.stage == "~tables")
    assert len([url for url in tables.files if "/made/" in url]) == 1
    assert len(folder.entries()) == 1
    assert vd.trace("docs/loud", 4_999, store=str(tmp_path / "store")).steps[0].row == 4_999
    # A stage that is added later reads the same rows.
    pipeline = docs(rows(ROWS, ROWS + 1))
    pipeline.map_batches("second", shout, schema={"loud": "VARCHAR"})
    result = materialize(pipeline, local, select=["second"])
    assert metadata(result, "second")["dagster/row_count"] == ROWS + 2


def test_partitions_preview_and_observations(tmp_path, local, materialize):
    days = dg.StaticPartitionsDefinition(["mon", "tue", "wed"])

    def week(tuesday: int) -> vd.Pipeline:
        data = [
            {"id": 1, "day": "mon", "text": "a"},
            {"id": tuesday, "day": "tue", "text": "b"},
            {"id": 2, "day": "mon", "text": "c"},
        ]
        source = vd.table(data, partition_column="day")
        pipeline = vd.Pipeline("week", source=source, id="id", partitions_def=days)
        pipeline.map_batches("loud", shout, schema="infer")
        return pipeline

    assert week(3)["loud"].preview(partition="mon")["loud"].to_pylist() == ["A", "C"]
    materialize(week(3), local, "mon")
    materialize(week(3), local, "tue")
    assert metadata(materialize(week(4), local, "mon"), "loud")["fragments_computed"] == 0
    assert metadata(materialize(week(4), local, "tue"), "loud")["fragments_computed"] == 1
    assert read_stage(tmp_path / "store", "week", "loud", "tue")["id"].to_pylist() == [4]
    failed = materialize(week(4), local, "wed", raises=False)
    assert not failed.success

    with dg.DagsterInstance.ephemeral() as instance:

        def observed(tuesday: int) -> list[str | None]:
            source = week(tuesday).build_source()
            job = dg.define_asset_job("observe", [dg.AssetKey(["week", "source"])])
            found = dg.Definitions(assets=[source], jobs=[job]).resolve_job_def("observe")
            result = found.execute_in_process(instance=instance)
            return [
                event.asset_observation_data.asset_observation.partition
                for event in result.all_events
                if event.event_type_value == "ASSET_OBSERVATION"
            ]

        assert observed(3) == ["mon", "tue"]
        assert observed(4) == ["tue"]


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


def test_folders_of_tables_are_no_pipelines(tmp_path, local, materialize):
    materialize(docs(rows()), local)
    assert {path.name for path in Path(tmp_path, "store").iterdir()} == {"docs", "~tables"}


def test_rows_without_an_id_column(tmp_path, local, materialize):
    def numbered(*texts: str) -> vd.Pipeline:
        source = vd.table({"text": ["a", "a", *texts]})
        pipeline = vd.Pipeline("docs", source=source, id=vd.row_id(), fragment_rows=1)
        pipeline.map_batches("loud", shout, schema={"loud": "VARCHAR"})
        return pipeline

    assert metadata(materialize(numbered(), local), "loud")["fragments_computed"] == 2
    assert metadata(materialize(numbered(), local), "loud")["fragments_computed"] == 0
    # The ids of all rows name the new table.
    assert metadata(materialize(numbered("b"), local), "loud")["fragments_computed"] == 3
    found = read_stage(tmp_path / "store", "docs", "loud")
    assert found["loud"].to_pylist() == ["A", "A", "B"]
    assert [id.rpartition("#")[2] for id in found["row_id"].to_pylist()] == ["0", "1", "2"]
    step = vd.trace("docs/loud", found["row_id"][2].as_py(), store=str(tmp_path / "store")).steps[0]
    assert step.row == 2
