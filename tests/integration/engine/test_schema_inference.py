"""Stages whose first run infers their schema, and previews."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.damage import stored_parts
from support.data import read_stage, write_source
from support.results import failure, metadata


def label(text: str) -> Any:
    return {"label": text.upper(), "score": len(text) / 2}


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"twice": batch["score"] * 2, "vector": np.ones((len(batch["id"]), 3), np.float32)}


class Letters:
    """Makes a row of each letter."""

    def __call__(self, row: dict[str, Any]) -> Any:
        for letter in row["label"]:
            yield {"letter": letter}


def rows(folder: Path, count: int = 60) -> str:
    ids = list(range(count))
    table = {"id": ids, "n": ids, "text": [f"t{n}" for n in ids]}
    write_source(folder, table)
    return str(folder)


def docs(
    tmp_path: Path, fn: Any = label, where: str | None = None, checks: Any = (), **options: Any
) -> vd.Pipeline:
    made = vd.Pipeline("docs", source=vd.parquet(rows(tmp_path / "src")), id="id")
    clean = made.project("clean", {"text": "text", "n": "n"}, where=where)
    labels = clean.map("labels", fn, schema="infer", include_columns=["n"], **options)
    labels.map_batches(
        "twice", doubled, schema="infer", batch_format="numpy", asset=vd.Asset(checks=checks)
    )
    labels.flat_map("letters", Letters, id="letter_id", schema="infer")
    return made


def pins(tmp_path: Path, stage: str) -> list[Path]:
    return sorted((tmp_path / "store" / "docs" / stage / "schemas").glob("*.json"))


def files(tmp_path: Path) -> list[str]:
    return sorted(str(path) for path in (tmp_path / "store").rglob("*") if path.is_file())


def computed(result: dg.ExecuteInProcessResult, *stages: str) -> list[int]:
    return [metadata(result, stage)["fragments_computed"] for stage in stages]


def logged(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> str:
    records = instance.get_records_for_run(result.run_id).records
    return "\n".join(record.event_log_entry.user_message for record in records)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


STAGES = ("clean", "labels", "twice", "letters")


def test_the_first_run_infers_pins_and_shows_the_schema(tmp_path, local, materialize, instance):
    result = materialize(docs(tmp_path), local, instance=instance)
    assert computed(result, *STAGES) == [1, 1, 1, 1]
    store = tmp_path / "store"
    labels = read_stage(store, "docs", "labels")
    assert labels.schema.names == ["id", "n", "label", "score"]
    assert labels["score"].to_pylist()[:2] == [1.0, 1.0]
    twice = read_stage(store, "docs", "twice").schema
    assert twice.field("vector").type == pa.list_(pa.float32(), 3)
    letters = read_stage(store, "docs", "letters")
    assert letters.schema.names == ["letter_id", "id", "letter"]
    assert letters.num_rows == sum(len(f"t{n}") for n in range(60))
    code = 'schema={"label": "VARCHAR", "score": "DOUBLE"}'
    assert metadata(result, "labels")["schema"] == f"```python\n{code}\n```"
    log = logged(instance, result)
    assert "stage 'labels': its schema was inferred from 16 rows" in log
    assert code in log
    assert 'schema={"twice": "DOUBLE", "vector": "FLOAT[3]"}' in log
    assert 'schema={"letter": "VARCHAR"}' in log

    declared = {spec.key: spec.code_version for spec in docs(tmp_path).build_assets().specs}
    events = [event.materialization for event in result.get_asset_materialization_events()]
    assert {e.asset_key: (e.tags or {})["dagster/code_version"] for e in events} == declared

    before = files(tmp_path)  # of previews nothing is left
    assert len(stored_parts(tmp_path / "store")) == 4
    again = materialize(docs(tmp_path), local, instance=instance)
    assert computed(again, *STAGES) == [0, 0, 0, 0]
    assert metadata(again, "labels")["schema"] == f"```python\n{code}\n```"
    assert "inferred" not in logged(instance, again)
    assert files(tmp_path) == before


def test_a_stage_has_one_pin_whether_it_runs_alone_or_not(tmp_path, local, materialize, capsys):
    def made() -> vd.Pipeline:
        return docs(tmp_path, checks=[vd.checks.Reproducible(rows=5)])

    materialize(made(), local, select=["clean", "labels"])
    before = files(tmp_path)
    store = vd.FragmentStore(root=str(tmp_path / "store"))
    assert made()["twice"].preview(2, store=store).table["twice"].to_pylist() == [2.0, 2.0]
    assert files(tmp_path) == before
    printed = capsys.readouterr().out
    assert 'stage \'labels\': schema={"label": "VARCHAR", "score": "DOUBLE"}' in printed  # pinned

    alone = made()
    write_source(tmp_path / "src", {"id": ["not read"], "n": [0], "text": ["x"]})
    assert computed(materialize(alone, local, select=["twice"]), "twice") == [1]
    assert json.loads(pins(tmp_path, "twice")[0].read_text())["rows"] == 16
    assert computed(materialize(made(), local), "labels", "twice") == [0, 0]
    assert len(pins(tmp_path, "twice")) == 1
    checked = dg.materialize(
        [made().build_assets()],
        selection=dg.AssetSelection.checks(dg.AssetCheckKey(made()["twice"].key, "reproducible")),
        resources={"compute": local, "store": store},
    )
    assert [evaluation.passed for evaluation in checked.get_asset_check_evaluations()] == [True]


def later(text: str) -> Any:
    return {"score": 1 if int(text[1:]) < 20 else "many"}


def fails(text: str) -> Any:
    raise ValueError("no luck")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"fn": later},
            [
                "column 'score': expected int64, found string",
                "declare {'score': 'VARCHAR'} in the schema",
            ],
        ),
        ({"fn": fails, "on_error": "quarantine"}, ["none of the first", "no luck"]),
    ],
)
def test_what_cannot_be_inferred_is_named(tmp_path, local, materialize, given, words):
    made = docs(tmp_path, **given)
    message = failure(materialize(made, local, select=["clean", "labels"], raises=False))
    for word in ("'docs/labels'", *words):
        assert word in message


def partitioned(tmp_path: Path, fn: Any) -> vd.Pipeline:
    for day in ("a", "b"):
        rows(tmp_path / "src" / day, 30)
    made = vd.Pipeline(
        "docs",
        source=vd.parquet(str(tmp_path / "src" / "{partition_key}")),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
    )
    made.map("labels", fn, schema="infer", columns={"text": "text"})
    return made


def test_empty_partitions_may_come_first(tmp_path, local, materialize):
    keys = [f"p{n}" for n in range(6)]
    for key in keys:
        ids = pa.array(range(20 if key == "p5" else 0), pa.int64())
        write_source(tmp_path / "src" / key, {"id": ids, "n": ids})
    made = vd.Pipeline(
        "docs",
        source=vd.parquet(str(tmp_path / "src" / "{partition_key}"), allow_empty=True),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(keys),
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    made.map("labels", lambda n: n / 2, schema="infer", columns={"n": "n"})
    edges = {"start": "p0", "end": "p5"}
    tags = {f"dagster/asset_partition_range_{edge}": key for edge, key in edges.items()}
    materialize(made, local, tags=tags)
    assert read_stage(tmp_path / "store", "docs", "labels", "p5").num_rows == 20
    assert read_stage(tmp_path / "store", "docs", "labels", "p0").schema.names == ["id", "labels"]


# Previews


def test_a_preview_computes_the_first_rows_and_keeps_nothing(tmp_path, capsys):
    made = docs(tmp_path)
    store = vd.FragmentStore(root=str(tmp_path / "store"))
    table = made["letters"].preview(4, store=store).table
    assert table.schema.names == ["letter_id", "id", "letter"]
    assert table["letter"].to_pylist() == ["T", "0", "T", "1"]
    printed = capsys.readouterr().out
    assert 'stage \'labels\': schema={"label": "VARCHAR", "score": "DOUBLE"}' in printed
    assert 'stage \'letters\': schema={"letter": "VARCHAR"}' in printed
    assert files(tmp_path) == []  # nor has it decided how files are cut into fragments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "name one if the pipeline has partitions"),
        ({"rows": 0, "partition": "a"}, "rows is 0"),
        ({"compute": vd.RayCompute(), "partition": "a"}, "give store= too"),
    ],
)
def test_a_wrong_argument_of_a_preview_is_refused(tmp_path, options, words):
    with pytest.raises(vd.errors.DefinitionError, match=words):
        partitioned(tmp_path, label)["labels"].preview(**options)


def test_a_preview_of_a_partition(tmp_path):
    table = partitioned(tmp_path, label)["labels"].preview(3, partition="b").table
    assert table["label"].to_pylist() == ["T0", "T1", "T2"]


class Slow:
    """Takes a while to load, which a second preview must not."""

    def __init__(self) -> None:
        self.number = 7

    def __call__(self, batch):
        pids = [os.getpid()] * batch.num_rows
        return {"y": [self.number] * batch.num_rows, "pid": pids}


def test_previews_and_runs_on_a_cluster_share_warm_models(tmp_path, cluster, materialize):
    write_source(tmp_path / "src", {"id": range(20), "n": range(20)})
    made = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    slow = made.map_batches("slow", Slow, schema={"y": "BIGINT", "pid": "BIGINT"})
    compute = vd.RayCompute(cluster=cluster)
    store = vd.FragmentStore(root=str(tmp_path / "store"))

    pids = [slow.preview(3, store=store, compute=compute).table["pid"][0].as_py() for _ in range(2)]
    assert pids[0] == pids[1] != os.getpid()
    done = metadata(materialize(made, compute), "slow")
    assert (done["model_loads"], done["warm_hits"]) == (0, 1)
    assert read_stage(tmp_path / "store", "docs", "slow")["pid"][0].as_py() == pids[0]
