"""A pipeline is written in a notebook, with previews on a cluster, and then run there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dagster as dg

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import metadata


class Label:
    def __call__(self, text: str) -> Any:
        return {"label": text.upper(), "score": len(text) / 2, "pid": os.getpid()}


class Letters:
    def __call__(self, row: dict[str, Any]) -> Any:
        for letter in row["label"]:
            yield {"letter": letter}


def docs(tmp_path: Path) -> vd.Pipeline:
    made = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    clean = made.project("clean", {"text": "text", "n": "n"})
    labels = clean.map("labels", Label, schema="infer", include_columns=["n"])
    labels.flat_map("letters", Letters, id="letter_id", schema="infer")
    return made


def files(tmp_path: Path) -> list[str]:
    return sorted(str(path) for path in (tmp_path / "store").rglob("*") if path.is_file())


def computed(result: dg.ExecuteInProcessResult) -> list[int]:
    return [metadata(result, s)["fragments_computed"] for s in ("clean", "labels", "letters")]


def logged(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> str:
    records = instance.get_records_for_run(result.run_id).records
    return "\n".join(record.event_log_entry.user_message for record in records)


def test_schemas_are_inferred_and_pinned_and_previews_warm_the_models(
    tmp_path, cluster, materialize, capsys
):
    write_source(
        tmp_path / "src", {"id": range(60), "n": range(60), "text": [f"t{n}" for n in range(60)]}
    )
    compute = vd.RayCompute(cluster=cluster)
    given = {"store": vd.FragmentStore(root=str(tmp_path / "store")), "compute": compute}
    schema = 'schema={"label": "VARCHAR", "score": "DOUBLE", "pid": "BIGINT"}'

    # Previews print the schemas, keep nothing, and share a warm model.
    letters = docs(tmp_path)["letters"].preview(4, **given).table
    assert letters.schema.names == ["letter_id", "id", "letter"]
    assert letters["letter"].to_pylist() == ["T", "0", "T", "1"]
    printed = capsys.readouterr().out
    inferred = "its schema was inferred from 16 rows"
    assert f"stage 'labels': {inferred}: {schema}" in printed
    assert f'stage \'letters\': {inferred}: schema={{"letter": "VARCHAR"}}' in printed
    assert files(tmp_path) == []
    pids = [docs(tmp_path)["labels"].preview(3, **given).table["pid"][0].as_py() for _ in range(2)]
    assert pids[0] == pids[1] != os.getpid()

    with dg.DagsterInstance.ephemeral() as instance:
        # The first run infers them too, with the same model, and shows them.
        result = materialize(docs(tmp_path), compute, instance=instance)
        assert computed(result) == [1, 1, 1]
        done = metadata(result, "labels")
        assert (done["model_loads"], done["warm_hits"]) == (0, 1)
        assert f"\n\n```python\n{schema}\n```\n\n" in done["details"]
        labels = read_stage(tmp_path / "store", "docs", "labels")
        assert labels.schema.names == ["id", "n", "label", "score", "pid"]
        assert labels["pid"][0].as_py() == pids[0]
        log = logged(instance, result)
        assert "stage 'labels': its schema was inferred from 16 rows" in log
        assert schema in log
        declared = {spec.key: spec.code_version for spec in docs(tmp_path).build_assets().specs}
        events = [event.materialization for event in result.get_asset_materialization_events()]
        assert {e.asset_key: (e.tags or {})["dagster/code_version"] for e in events} == declared

        # The next one takes them from the store.
        again = materialize(docs(tmp_path), compute, instance=instance)
        assert computed(again) == [0, 0, 0]
        assert "inferred" not in logged(instance, again)
