"""A schema that a run infers, in its events and its log."""

from __future__ import annotations

from typing import Any

import dagster as dg

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import metadata


def label(text: str) -> Any:
    return {"label": text.upper(), "score": len(text) / 2}


def letters(row: dict[str, Any]) -> Any:
    for letter in row["label"]:
        yield {"letter": letter}


def logged(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> str:
    records = instance.get_records_for_run(result.run_id).records
    return "\n".join(record.event_log_entry.user_message for record in records)


def test_the_first_run_infers_schemas_and_the_next_takes_them_from_the_store(
    tmp_path, local, materialize
):
    texts = [f"t{n}" for n in range(60)]
    write_source(tmp_path / "src", {"id": range(60), "n": range(60), "text": texts})
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    labels = docs.map("labels", label, schema="infer", include_columns=["n"])
    labels.flat_map("letters", letters, id="letter_id", schema="infer")
    schema = 'schema={"label": "VARCHAR", "score": "DOUBLE"}'

    with dg.DagsterInstance.ephemeral() as instance:
        result = materialize(docs, local, instance=instance)
        assert f"\n\n```python\n{schema}\n```\n\n" in metadata(result, "labels")["details"]
        names = [read_stage(tmp_path / "store", "docs", each).schema.names for each in docs.stages]
        assert names == [["id", "n", "label", "score"], ["letter_id", "id", "letter"]]
        inferred = "its schema was inferred from 16 rows"
        assert f"stage 'labels': {inferred}: {schema}" in logged(instance, result)
        assert f"stage 'letters': {inferred}: " in logged(instance, result)
        declared = {spec.key: spec.code_version for spec in docs.build_assets().specs}
        events = [event.materialization for event in result.get_asset_materialization_events()]
        assert {e.asset_key: (e.tags or {})["dagster/code_version"] for e in events} == declared

        again = materialize(docs, local, instance=instance)
        assert metadata(again, "letters")["fragments_computed"] == 0
        assert "inferred" not in logged(instance, again)
