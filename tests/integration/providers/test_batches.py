"""Prompt stages in batch mode: runs that submit, and runs that go on with the answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

import vane_dagster as vd
from support.data import read_stage, write_source
from support.in_process import InProcessCompute
from support.prompts import asked, docs
from support.results import metadata
from vane_dagster.cli.main import main

pytestmark = pytest.mark.usefixtures("clients")


def declared(tmp_path: Path, url: str, texts: Sequence[Any], **given: Any) -> vd.Pipeline:
    """docs -> asked -> below, in fragments of two rows."""
    pipeline = docs(tmp_path, list(texts))
    pipeline.fragment_rows = 2
    stage = asked(pipeline, url, **{"mode": "batch", **given})
    stage.project("below", ["id", "asked"])
    return pipeline


def rows(tmp_path: Path, stage: str = "below") -> list[Any]:
    return read_stage(tmp_path / "store", "docs", stage).sort_by("id")["asked"].to_pylist()


def made(result: dg.ExecuteInProcessResult) -> set[str]:
    events = result.get_asset_materialization_events()
    return {event.materialization.asset_key.path[-1] for event in events}


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_run_submits_and_ends_and_the_next_one_commits(
    tmp_path, endpoint, batches, materialize, provider, server
):
    batches.ends_at_once, local = False, InProcessCompute()
    texts = ["one", "two", "three", "expires", "lost", "twice", "busy"]
    prices = {"prompt": 2e6, "completion": 4e6}
    pipeline = declared(tmp_path, endpoint[1], texts, provider=provider, prices=prices)

    first = materialize(pipeline, local)
    assert first.success
    assert made(first) == set()
    (batch,) = batches.made
    assert len(batch.lines) == len(texts)
    # A run while it is in flight submits nothing.
    assert made(materialize(pipeline, local)) == set()
    assert len(batches.made) == 1

    # Rows that failed for a cause that may pass are in the next batch, and nothing else.
    batches.end()
    assert made(materialize(pipeline, local)) == set()
    assert sorted(p for _, b in batches.made[1].lines for p in [b["messages"][-1]["content"]]) == [
        "busy", "expires", "lost",
    ]  # fmt: skip
    batches.end()
    done = materialize(pipeline, local)
    assert made(done) == {"asked", "below"}
    assert rows(tmp_path) == [f"echo: {text}" for text in texts]
    assert batches.prompts == {t: 1 + (t in ("busy", "expires", "lost")) for t in texts}
    assert server.requests == {t: 1 + (t == "busy") for t in texts}

    # At half the price.
    facts = metadata(done, "asked")
    full = facts["prompt_tokens"] * 2 + facts["completion_tokens"] * 4
    assert facts["batch_requests"] == facts["requests"] == len(texts)
    assert facts["cost_of_answers"] == pytest.approx(full / 2)

    # Nothing is left to do, also for the same rows in another mode.
    assert made(materialize(pipeline, local)) == {"asked", "below"}
    live = declared(tmp_path, endpoint[1], texts, provider=provider, mode="live")
    materialize(live, local)
    assert (len(batches.made), len(server.bodies)) == (2, len(texts) + 1)


# Dagster

DAYS = dg.StaticPartitionsDefinition(["mon", "tue", "wed"])


def by_day(tmp_path: Path, url: str) -> vd.Pipeline:
    for day in DAYS.get_partition_keys():
        write_source(tmp_path / "days" / day, {"id": range(2), "text": [f"{day} 0", f"{day} 1"]})
    source = vd.parquet(f"{tmp_path}/days/{{partition_key}}")
    days = vd.Pipeline("days", source=source, id="id", partitions_def=DAYS)
    asked(days, url, mode="batch").project("below", ["id", "asked"])
    return days


def test_a_sensor_requests_the_runs_that_go_on(tmp_path, endpoint, batches, server):
    """A run over two partitions submits; an asset of another step is skipped meanwhile."""
    batches.ends_at_once = False
    days = by_day(tmp_path, endpoint[1])
    store = vd.FragmentStore(root=str(tmp_path / "store"))

    @dg.multi_asset(
        specs=[dg.AssetSpec("report", deps=[days["below"].key], partitions_def=DAYS)],
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def report() -> None: ...

    assets, sensor = [days.build_assets(), report], days.build_batch_sensor()
    resources = {"compute": InProcessCompute(), "store": store}
    with dg.instance_for_test() as instance:
        first = dg.materialize(
            assets,
            resources=resources,
            instance=instance,
            tags={"dagster/asset_partition_range_start": "mon",
                  "dagster/asset_partition_range_end": "tue"},
        )  # fmt: skip
        assert first.success
        assert first.get_asset_materialization_events() == []
        observed = [e for e in first.all_events if e.event_type_value == "ASSET_OBSERVATION"]
        assert len(observed) == 4
        steps = {e.step_key for e in first.all_events if e.is_step_skipped}
        assert steps == {"report"}

        def tick(cursor: str | None = None) -> dg.SensorResult:
            context = dg.build_sensor_context(instance, cursor=cursor, resources={"store": store})
            found = sensor(context)
            assert isinstance(found, dg.SensorResult)
            return found

        nothing = tick()
        assert nothing.run_requests == []
        assert "batches in flight: 1" in str(nothing.skip_reason)
        batches.end()
        found = tick(nothing.cursor)
        (request,) = found.run_requests or ()
        for failures in (1, 2, 3):
            run = instance.create_run_for_job(
                dg.job(name="failed")(lambda: None), tags=request.tags
            )
            instance.report_run_failed(run)
            (again,) = tick(nothing.cursor).run_requests or ()
            assert again.run_key == f"{str(request.run_key)[:-1]}{min(failures, 2)}"
        assert request.tags["dagster/asset_partition_range_start"] == "mon"
        assert request.tags["dagster/asset_partition_range_end"] == "tue"
        assert [key.path[-1] for key in request.asset_selection or ()] == ["asked", "below"]
        second = dg.materialize(
            assets,
            selection=list(request.asset_selection or ()),
            resources=resources,
            instance=instance,
            tags=request.tags,
            run_config=request.run_config,
        )
        done = [e.materialization for e in second.get_asset_materialization_events()]
        assert {(m.asset_key.path[-1], m.partition) for m in done} == {
            (stage, day) for stage in ("asked", "below") for day in ("mon", "tue")
        }
        assert tick(found.cursor).run_requests == []


DEFINITIONS = """
import dagster as dg
import vane_dagster as vd

docs = vd.Pipeline("docs", source=vd.parquet({source!r}), id="id")
asked = docs.prompt(
    "asked",
    "{{text}}",
    provider="openai",
    model=vd.Model("m", options={{"base_url": {url!r}, "api_key_env": "LLM_KEY"}}, mode="batch"),
    concurrency=vd.Workers(env_vars=["LLM_KEY"]),
)
asked.project("below", ["id", "asked"])
resources = {{"compute": vd.LocalCompute(num_cpus=1), "store": vd.FragmentStore(root={store!r})}}
defs = dg.Definitions([docs.build_assets()], resources=resources)
"""


def test_the_command_line_lists_cancels_and_collects(
    tmp_path, endpoint, batches, monkeypatch, materialize, local
):
    batches.ends_at_once = False
    url, store = endpoint[1], str(tmp_path / "store")
    pipeline = declared(tmp_path, url, ["one", "slow"])
    file = tmp_path / "definitions_of_batches.py"
    file.write_text(DEFINITIONS.format(source=f"{tmp_path}/src", url=url, store=store))
    monkeypatch.delenv("DAGSTER_HOME", raising=False)

    def command(name: str, *more: str) -> str:
        done = CliRunner().invoke(main, ["batches", name, "docs", "-f", str(file), *more])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "There is no batch." in command("list")
    materialize(pipeline, local)
    for name in ("list", "collect"):
        assert re.match(
            r"asked: batch \w{16}, 2 requests, .*: submitted, expected by", command(name)
        )
    planned = pipeline.plan(store=store)
    assert "2 requests of 'asked' are in flight in batches and already paid for" in str(planned)
    assert command("cancel", "--batch", "another") == ""
    assert ": cancelling, expected by" in command("cancel")
    batches.end()
    # What was cancelled is asked again by a run, and by nothing else.
    assert command("collect") == ""
    assert ", 1 canceled" in command("list")
    assert made(materialize(pipeline, local)) == set()
    assert batches.prompts == {"one": 1, "slow": 2}
    batches.end()
    assert command("collect") == "ran asked, below in 1 partition\n"
    assert rows(tmp_path) == ["echo: one", "echo: slow"]
    assert command("collect") == "", "nothing is left to do"


def test_a_run_that_waits_reports_all_partitions(tmp_path, endpoint, batches, server):
    """Though some of them wait for batches of one stage, and others for those of two."""
    days = by_day(tmp_path, endpoint[1])
    asked(days, endpoint[1], "again: {text}", name="other", mode="batch")
    compute = InProcessCompute()
    resources = {"compute": compute, "store": vd.FragmentStore(root=str(tmp_path / "store"))}
    wait = {"ops": {"days_pipeline": {"config": {"wait": True}}}}
    given: Any = {"resources": resources, "run_config": wait}
    assets = [days.build_assets()]
    with dg.instance_for_test() as instance:
        given["instance"] = instance
        first = dg.materialize(assets, selection=[days["asked"].key], partition_key="tue", **given)
        assert made(first) == {"asked"}
        edges = {"start": "mon", "end": "tue"}
        tags = {f"dagster/asset_partition_range_{edge}": key for edge, key in edges.items()}
        events = dg.materialize(assets, tags=tags, **given).get_asset_materialization_events()
    found = {(e.materialization.asset_key.path[-1], e.materialization.partition) for e in events}
    assert found == {(stage, day) for stage in days.stages for day in ("mon", "tue")}
