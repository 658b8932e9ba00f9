"""What a run through Dagster logs: progress, prints, errors and its summary."""

from __future__ import annotations

import json
import logging
import re
import time

import dagster as dg
from click.testing import CliRunner

import vane_dagster as vd
from support.data import write_source
from support.results import failure
from vane_dagster.cli.main import main
from vane_dagster.orchestration import progress


def logged(result, instance) -> str:
    entries = [r.event_log_entry for r in instance.get_records_for_run(result.run_id).records]
    problems = [entry.user_message for entry in entries if entry.level >= logging.WARNING]
    assert all("it slept" in text for text in problems), problems
    return "\n".join(entry.user_message for entry in entries)


class Slow:
    def __call__(self, batch):
        time.sleep(0.1)
        print("a batch of", batch.num_rows)
        logging.getLogger(__name__).warning("it slept")
        return batch


def fails(batch):
    return {"label": batch["idd"]}


def test_a_run_logs_progress_prints_a_summary_and_errors(tmp_path, materialize, local, monkeypatch):
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.3)
    write_source(tmp_path / "src", {"id": range(20)})
    pipeline = vd.Pipeline("slow", source=vd.parquet(str(tmp_path / "src")), id="id")
    pipeline.map_batches("slept", Slow, schema={"id": "BIGINT"}, batch_size=1)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with dg.DagsterInstance.get() as instance:
        result = materialize(pipeline, local, instance=instance)
        log = logged(result, instance)
    assert re.search(r"slept: \d+ of 20 rows \(\d+%\), [\d.]+ rows/s, [\d.]+ s left", log), log
    assert re.search(r"slept printed \(worker .+\):\na batch of 1\nit slept", log), log
    assert re.search(r"Slow loaded in [\d.]+ s \(worker .*, pid \d+, cpu\)", log)
    assert re.search(
        r"finished in \d.*, plan \d.*, connection \d.*, first worker \d.*\n"
        r"  slept: partitions: 1 committed; 20 rows in .* rows/s; "
        r"\d workers?: computing \d+%, .*; \d+% of the computing time in your code; "
        r"fragments: 1 computed, 0 reused\n  model Slow: \d started in .*\n  bottleneck: .*'slept'",
        log,
    ), log

    # What subprocesses wrote is in the output of their step.
    logs = ["logs", result.run_id[:8], "--name", "absent"]
    shown = CliRunner().invoke(main, [*logs, "slow/slept"]).output
    assert f"==> run {result.run_id}, step slow_pipeline on" in shown
    assert "a batch of 1\n" in shown
    missing = CliRunner().invoke(main, [*logs, "slow/slept"], env={"DAGSTER_HOME": ""})
    assert missing.exit_code == 1
    assert "no worker has a log of slow/slept in the run" in missing.output

    # The step's last result has the summary, which the command prints.
    shown = CliRunner().invoke(main, ["advise", result.run_id[:8]]).output
    _, _, summary = shown.rstrip().partition("slow_pipeline\n")
    assert summary.startswith("finished in ")
    assert summary in log
    figures = json.loads(CliRunner().invoke(main, ["advise", result.run_id, "--json"]).output)
    _, slept = figures["slow_pipeline"]["pools"]
    assert slept["stages"] == ["slept"]
    assert slept["computing"] > 0
    absent = CliRunner().invoke(main, ["advise", "absent"])
    assert "it matches none of the latest" in absent.output
    with dg.DagsterInstance.get() as instance:  # as of a driver that was killed
        other = dg.materialize([dg.asset(name="other")(lambda: None)], instance=instance)
    none = CliRunner().invoke(main, ["advise", other.run_id]).output
    assert "it only observed or checked, failed before it computed, was stopped, or" in none

    # An error in the user's code is the run's error, with a hint, and with the user's frames alone.
    pipeline = vd.Pipeline("slow", source=vd.parquet(str(tmp_path / "src")), id="id")
    pipeline.map_batches("out", fails, schema={"label": "BIGINT"}).project("read", ["label"])
    with dg.DagsterInstance.ephemeral() as instance:
        result = materialize(pipeline, local, instance=instance, raises=False)
        records = instance.get_records_for_run(result.run_id).records
        entries = [record.event_log_entry for record in records]
    text = failure(result)
    first, _, frames = text.partition("\n\n")
    assert re.match(
        r"stage 'slow/out', fragment 0 \(rows 0 to 20 of .*\): in a batch of 20 rows, .*: "
        r"KeyError: .*'id'\. Did you mean 'id'\?$",
        first,
    ), first
    assert re.match(r'Traceback .*:\n  File ".*test_run_log\.py", line \d+, in fails\n', frames)
    assert text.count("KeyError") == 1
    assert "vane_dagster/" not in frames
    logged_text = [each.user_message for each in entries if not each.is_dagster_event]
    assert [line for line in logged_text if "KeyError" in line] == [first]
    observed = result.asset_observations_for_node("slow_pipeline")
    assert [each.asset_key.path[-1] for each in observed] == ["out", "read"]
    for one in observed:  # of the stage that reads it too
        assert {name: each.value for name, each in one.metadata.items()} == {
            "state": "failed",
            "error": first,
            "logs": f"`vane-dagster logs {result.run_id[:8]} slow/out`",
        }
    failed = next(each for each in result.all_events if each.is_step_failure).step_failure_data
    assert "  out: partitions: 1 failed; " in failed.user_failure_data.metadata["summary"].value
    assert failed.error.message.endswith(f"{text}\n")
    assert failed.error.cause is None
