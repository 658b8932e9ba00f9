"""What workers wrote, by run and stage, as the commands read it from Ray's logs."""

from __future__ import annotations

import json
import os
from typing import Any

import dagster as dg
from click.testing import CliRunner

import vane_dagster as vd
from support.results import failure, materializing
from vane_dagster.cli.main import main
from vane_dagster.compute.worker_logs import of_cluster


class Talks:
    def __init__(self, word: str) -> None:
        print(f"construct {word}")
        os.write(2, b"native code loads\n")

    def __call__(self, batch: Any) -> Any:
        if 3 in batch["n"].to_pylist():
            os.write(2, b"native code crashes\n")
            os.abort()
        os.write(1, b"native code runs\n")
        return {"m": batch["n"].to_pylist()}


def silent(batch: Any) -> Any:
    return {"m": batch["n"].to_pylist()}


def call(*words: str) -> Any:
    return CliRunner().invoke(main, [*words, "--name", "tests"])


def test_what_workers_wrote_is_read_by_run_and_stage(tmp_path, cluster):
    pipeline = vd.Pipeline("talk", source=vd.table([{"id": 1, "n": 3}]), id="id")
    given = {"columns": ["n"], "schema": {"m": "BIGINT"}, "fn_constructor_args": ("crash",)}
    pipeline.map_batches("crashes", Talks, **given)
    compute, materialize = vd.RayCompute(cluster=cluster), materializing(tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        result = materialize(pipeline, compute, raises=False, instance=instance)
        run = result.run_id
        key = pipeline["crashes"].key
        (event,) = instance.fetch_observations(key, limit=1).records
        command = f"vane-dagster logs {run[:8]} talk/crashes --name tests"
        assert event.asset_observation.metadata["logs"].value == f"`{command}`"
        assert failure(result).endswith(f"Output of the workers: `{command}`")

    # The workers that wrote it are dead.
    shown = call("logs", run[:8], "talk/crashes").output
    assert shown.count("==> ") >= 2, shown
    assert {"construct crash", "native code loads", "native code crashes"} <= {*shown.splitlines()}
    cluster.connect()
    assert {each.worker for each in of_cluster(run, "talk/crashes")}
    assert [*of_cluster(run, "talk/absent")] == []

    # A warm pool serves several runs, each with lines of its own.
    pipeline = vd.Pipeline("talk", source=vd.table([{"id": 1, "n": 1}, {"id": 2, "n": 2}]), id="id")
    pipeline.map_batches("runs", Talks, **{**given, "fn_constructor_args": ("again",)})
    first = materialize(pipeline, compute)
    second = materialize(pipeline, compute, config={"force": True})
    lines = [call("logs", each.run_id, "talk/runs").output for each in (first, second)]
    assert ["construct again" in each for each in lines] == [True, False]
    assert ["native code runs" in each for each in lines] == [True, True]
    pipeline.map_batches("silent", silent, schema={"m": "BIGINT"})
    run = materialize(pipeline, compute).run_id
    assert call("logs", run, "talk/silent").output == (
        f"The workers of talk/silent wrote nothing in the run {run}.\n"
    )
    missing = call("logs", first.run_id, "talk/absent")
    assert (missing.exit_code, "no worker has a log" in missing.output) == (1, True)

    pools = json.loads(call("pools", "--json").stdout)
    names = [each["identity"] for each in pools if each["label"].startswith("Talks")]
    assert any(call("pools", "logs", each).output.count("native code runs") > 1 for each in names)
