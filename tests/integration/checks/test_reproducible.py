"""The check that computes stored rows again, as Dagster executes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa

import vane_dagster as vd
from support.data import write_source
from support.warm_workers import ForkedLocal

ROWS = 40


class Stars:
    """A model that reads a file whenever it is called, which no key can know."""

    def __init__(self, path: str) -> None:
        self.folder = path.rpartition("/")[0]

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        factor = float(Path(self.folder, "factor.txt").read_text())
        texts = batch["text"].to_pylist()
        return {"stars": [len(text) * factor for text in texts], "label": [t[:1] for t in texts]}


def pipeline(tmp_path: Path) -> vd.Pipeline:
    docs = vd.Pipeline(
        "docs",
        source=vd.parquet(str(tmp_path / "source" / "{partition_key}")),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
        fragment_rows=32,
    )
    docs.map_batches(
        "stars",
        Stars,
        fn_constructor_args=[f"{tmp_path}/data/there"],
        schema={"stars": "DOUBLE", "label": "VARCHAR"},
        concurrency=1,
        asset=vd.Asset(checks=[vd.checks.Reproducible(rows=10)]),
    )
    return docs


def test_a_file_that_was_edited_is_found_and_the_rows_are_named(tmp_path):
    for key in "ab":
        ids = pa.array(range(ROWS), pa.int64())
        texts = [f"{'x' * (i % 7)}{i}" for i in range(ROWS)]
        write_source(tmp_path / "source" / key, pa.table({"id": ids, "text": texts}))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "factor.txt").write_text("2.0")
    docs = pipeline(tmp_path)
    resources = {
        "compute": ForkedLocal(num_cpus=2),  # models stay warm
        "store": vd.FragmentStore(root=str(tmp_path / "store")),
    }

    with dg.DagsterInstance.ephemeral() as instance:

        def run(partition: str | None = None, **given: Any) -> dg.ExecuteInProcessResult:
            assets = docs.build_assets()
            result = dg.materialize(
                [assets], instance=instance, resources=resources, partition_key=partition, **given
            )
            assert result.success
            return result

        def evaluated(**config: Any) -> dict[str | None, dg.AssetCheckEvaluation]:
            key = dg.AssetCheckKey(docs["stars"].key, "reproducible")
            config = {"ops": {"docs_pipeline": {"config": config}}}
            result = run(selection=dg.AssetSelection.checks(key), run_config=config)
            kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION
            events = instance.all_logs(result.run_id, of_type=kind)
            found = [event.dagster_event.asset_check_evaluation_data for event in events]
            return {each.partition: each for each in found}

        # A run does not execute the check.
        for key in "ab":
            names = {each.check_name for each in run(key).get_asset_check_evaluations()}
            assert "reproducible" not in names

        # Executed alone, it samples all partitions, with the warm model.
        files = sorted((tmp_path / "store").rglob("*"))
        found = evaluated(reproduce_seed=7)
        assert set(found) == {"a", "b"}
        each = {name: value.value for name, value in found["a"].metadata.items()}
        assert "10 rows computed again; all match" in found["a"].description
        assert (each["rows"], each["differing"], each["seed"]) == (10, 0, "7")
        assert (each["loads"], each["warm"]) == (0, 1)
        assert each["code_changed"] is False

        # What no key knows of is edited: a run computes nothing, and the check names the rows.
        (tmp_path / "data" / "factor.txt").write_text("3.0")
        run("b")
        found = evaluated(reproduce_seed=7, reproduce_rows=8, reproduce_partitions=["b"])
        (b,) = found.values()
        assert (b.partition, b.passed, b.severity) == ("b", False, dg.AssetCheckSeverity.ERROR)
        assert "8 of 8 rows differ from the stored rows" in b.description
        rows = [record.data for record in b.metadata["differences"].records]
        assert len(rows) == 8
        for row in rows:
            length = len(f"{'x' * (int(row['id']) % 7)}{row['id']}")
            shown = (row["column"], row["stored"], row["computed"])
            assert shown == ("stars", str(length * 2.0), str(length * 3.0))
        assert sorted((tmp_path / "store").rglob("*")) == files, "nothing is left or committed"
