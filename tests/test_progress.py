"""Progress in the run's log, and as bars in a terminal."""

from __future__ import annotations

import re
import time

import dagster as dg
from conftest import write_source

import vane_dagster as vd
from vane_dagster.execute.events import Progress
from vane_dagster.report.progress import ProgressReport, describe


class Slow:
    """Takes a tenth of a second a batch."""

    def __call__(self, batch):
        time.sleep(0.1)
        print("a batch of", batch.num_rows)
        return batch


def test_a_line_tells_rows_rate_and_time_left():
    progress = Progress({"clean": 100, "embedding": 25}, {"clean": 100, "embedding": 100}, 15.0)

    assert describe(progress, {"embedding": (11.0, 5)}) == [
        "embedding: 25 of 100 rows (25%), 5 rows/s, 00:00:15 left",
    ]


def test_a_terminal_gets_a_bar_a_stage(capsys):
    report = ProgressReport(print, terminal=True)

    report(Progress({"embedding": 25}, {"embedding": 100}, 1.0))
    report(Progress({"embedding": 100}, {"embedding": 100}, 2.0))
    report.close()

    drawn = capsys.readouterr().err
    assert "embedding" in drawn
    assert "100%" in drawn


def test_a_run_tells_its_progress_and_what_the_code_printed(tmp_path, materialize, local):
    write_source(tmp_path / "src", {"id": range(80)})
    pipeline = vd.Pipeline("slow", source=vd.parquet(str(tmp_path / "src")), id="id")
    pipeline.map_batches("slept", Slow, schema={"id": "BIGINT"}, batch_size=1)
    with dg.DagsterInstance.ephemeral() as instance:
        result = materialize(pipeline, local, instance=instance)

        records = instance.get_records_for_run(result.run_id).records
        log = "\n".join(record.event_log_entry.user_message for record in records)
    assert re.search(r"slept: \d+ of 80 rows \(\d+%\), \d+ rows/s, 00:00:\d\d left", log), log
    assert "slept printed:\na batch of 1" in log
    assert re.search(r"Slow loaded in [\d.]+ s \(worker .*, pid \d+, cpu\)", log)
