"""A user's own check in Dagster runs: declared, evaluated at each commit, blocking, edited."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd

DAYS = dg.StaticPartitionsDefinition(["a", "b"])


@dataclass(frozen=True)
class LongTexts(vd.checks.Check):
    """Few texts are longer than a model reads"""

    column: str
    max_characters: int = 8
    max_share: float = 0.0

    def evaluate(self, context: vd.checks.CheckContext) -> vd.checks.CheckOutcome:
        found: list[dict[str, Any]] = []
        for batch in context.batches([context.id, self.column]):
            for row in batch.to_pylist():
                if len(row[self.column]) > self.max_characters:
                    found.append({"id": row[context.id], "length": len(row[self.column])})
        rows = context.counts.rows
        return vd.checks.CheckOutcome(
            passed=len(found) <= self.max_share * rows,
            description=f"{len(found)} of {rows} texts are long in {context.partition}",
            metadata={"rows": rows, "long": found} if found else {"rows": rows},
        )


@dataclass(frozen=True)
class Grows(vd.checks.Check):
    """A partition has no fewer rows than the one before"""

    compares = True

    def evaluate(self, context: vd.checks.CheckContext) -> vd.checks.CheckOutcome:
        before = context.previous()
        if before is None:
            return vd.checks.CheckOutcome(True, "the first")
        rows = before.counts.rows, context.counts.rows
        nulls = context.statistics(["upper"])["upper"].nulls
        return vd.checks.CheckOutcome(rows[0] <= rows[1], f"{rows}, {nulls} nulls")


@dataclass(frozen=True)
class Broken(vd.checks.Check):
    def evaluate(self, context: vd.checks.CheckContext) -> vd.checks.CheckOutcome:
        raise ZeroDivisionError("in the check")


def upper(batch: pa.Table) -> dict[str, Any]:
    return {"upper": [text.upper() for text in batch["text"].to_pylist()]}


def pipeline(folder: Path, *checks: vd.checks.Check) -> vd.Pipeline:
    source = vd.parquet(str(folder / "source" / "{partition_key}"))
    docs = vd.Pipeline("docs", source=source, id="id", partitions_def=DAYS, fragment_rows=2)
    made = docs.map_batches(
        "upper", upper, schema={"upper": "VARCHAR"}, asset=vd.Asset(checks=checks)
    )
    made.project("below", ["upper"])
    return docs


class Runs:
    def __init__(self, folder: Path, compute: vd.LocalCompute, instance: dg.DagsterInstance):
        self.instance = instance
        self.resources = {
            "compute": compute,
            "store": vd.FragmentStore(root=str(folder / "store")),
        }
        for key, texts in {"a": ["x", "y" * 9, "z"], "b": ["x", "y"]}.items():
            (folder / "source" / key).mkdir(parents=True)
            table = pa.table({"id": range(len(texts)), "text": texts})
            pq.write_table(table, folder / "source" / key / "0.parquet")

    def __call__(self, docs: vd.Pipeline) -> tuple[bool, dict[tuple[str, str], Any]]:
        """Materialize both partitions; return success, and evaluations by name and partition."""
        result = dg.materialize(
            [docs.build_assets()],
            instance=self.instance,
            tags={
                "dagster/asset_partition_range_start": "a",
                "dagster/asset_partition_range_end": "b",
            },
            resources=self.resources,
            raise_on_error=False,
        )
        kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION
        events = self.instance.all_logs(result.run_id, of_type=kind)
        found = [event.dagster_event.asset_check_evaluation_data for event in events]
        own = [each for each in found if each.asset_key.path[-1] == "upper"]
        return result.success, {(each.check_name, each.partition): each for each in own}

    def rows(self, stage: str, partition: str) -> int | None:
        # Dagster types the resources of a context as object.
        store = self.resources["store"].open()  # type: ignore[attr-defined]  # of any class
        manifest = store.in_force("docs", stage, partition)
        return None if manifest is None else manifest.rows


def test_checks_of_a_user_from_declaration_to_the_event_log(tmp_path: Path, local: vd.LocalCompute):
    with dg.DagsterInstance.ephemeral() as instance:
        runs = Runs(tmp_path, local, instance)
        docs = pipeline(tmp_path, LongTexts("upper", severity="WARN"), Grows(), Broken())
        specs = {
            spec.name: spec
            for spec in docs.build_assets().check_specs
            if spec.asset_key == docs["upper"].key
        }
        assert {"long_texts", "grows", "broken"} < specs.keys()
        assert specs["long_texts"].description == "Few texts are longer than a model reads"

        success, found = runs(docs)
        assert success, "none of them blocks"
        long = found["long_texts", "a"]
        assert (long.passed, long.severity) == (False, dg.AssetCheckSeverity.WARN)
        assert long.description == "1 of 3 texts are long in a"
        (record,) = long.metadata["long"].records
        assert record.data == {"id": 1, "length": 9}
        assert found["long_texts", "b"].passed
        assert found["grows", "a"].description == "the first"
        assert found["grows", "b"].description == "(3, 2), 0 nulls"
        broken = found["broken", "a"]
        assert not broken.passed
        assert broken.metadata["error"].value == "ZeroDivisionError: in the check"
        assert runs.rows("below", "a") == 3

        tolerant = pipeline(tmp_path, LongTexts("upper", max_share=0.5), Grows())
        success, found = runs(tolerant)
        assert success
        assert found["long_texts", "a"].passed, "other thresholds are evaluated for stored rows"
