"""Ordinary assets, and stages of other pipelines, as a pipeline's source."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.results import entries

PARTS = dg.StaticPartitionsDefinition(["a", "Ö / b"])
pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")


def table(rows: int, start: int = 0) -> pa.Table:
    numbers = range(start, start + rows)
    columns = [pa.array(numbers, pa.int64()), pa.array(map(float, numbers), pa.float64())]
    return pa.table(columns, names=["id", "n"])


def over(source: Any, name: str) -> vd.Pipeline:
    made = vd.Pipeline(name, source=source, id="id", partitions_def=PARTS)
    made.project("clean", {"n": "n * 2"}).map_batches(
        "more", add_one, schema={"more": "DOUBLE"}, batch_format="numpy"
    )
    return made


def add_one(batch):
    return {"more": batch["n"] + 1}


def test_rows_of_other_assets_and_what_was_added(tmp_path, local, monkeypatch):
    """An ordinary asset, a pipeline over it, and one over a stage of that pipeline."""
    monkeypatch.setattr("vane_dagster.storage.asset_writer._MAX_ROWS", 256)
    store = vd.FragmentStore(root=str(tmp_path / "store"))

    @dg.asset(
        io_manager_key="store",
        partitions_def=PARTS,
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def raw_docs():
        return numbers

    docs = over(raw_docs, "docs")
    third = over(docs["clean"].key, "third")
    assets = [raw_docs, docs.build_assets(), third.build_assets()]

    def run(partition: str) -> tuple[int, int]:
        """Return the fragments that were computed and reused in each stage of both pipelines."""
        resources = {"compute": local, "store": store}
        result = dg.materialize(assets, partition_key=partition, resources=resources)
        events = {e.asset_key: e.materialization for e in result.get_asset_materialization_events()}
        used = events[docs["clean"].key].tags["dagster/input_data_version/raw_docs"]
        assert used == events[raw_docs.key].tags["dagster/data_version"], "it is not stale"
        found = {
            tuple(entries(event.metadata)[f"fragments_{name}"] for name in ("computed", "reused"))
            for key, event in events.items()
            if key != raw_docs.key
        }
        assert len(found) == 1
        return found.pop()

    def more(pipeline: str = "docs") -> list[float]:
        return vd.load(f"{pipeline}/more", "Ö / b", store=store)["more"].to_pylist()

    # The first runs: rows in the order of the asset's.
    numbers = table(20)
    assert run("a") == (1, 0)
    numbers = table(600)
    assert run("Ö / b") == (3, 0)
    assert more() == [2.0 * n + 1 for n in range(600)]
    assert more("third") == [4.0 * n + 1 for n in range(600)]
    assert run("Ö / b") == (0, 3)

    # The asset has grown, and then one row has changed.
    numbers = table(800)
    assert run("Ö / b") == (2, 2)
    assert more() == [2.0 * n + 1 for n in range(800)]
    changed = table(800).to_pandas()
    changed.loc[300, "n"] = -1.0
    numbers = pa.Table.from_pandas(changed)
    assert run("Ö / b") == (1, 3)
    assert (more()[300], more("third")[300]) == (-1.0, -3.0)
