"""Traces as text and as data."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store
from vane_dagster.tracing.command import trace_command
from vane_dagster.tracing.steps import Step, Trace

SOURCE = Step("docs/source", "source", "p", {"id": 7}, "/data/a.parquet", 3, version="v", size=1234)
CLEAN = Step(
    "docs/clean", "project", "p", {"id": 7}, "/store/k.parquet", 0, ("source",),
    manifest="1-g0", run_id="one", committed_by="two", code_version="abc", workers=("io-1",),
    at=0.0, notes=("a|b",),
)  # fmt: skip


def trace(*steps: Step, **given: Any) -> Trace:
    return Trace("docs/clean", "p", 7, False, steps, **given)


def test_a_trace_names_row_file_runs_workers_and_code():
    text = str(trace(SOURCE, CLEAN, missing={"docs/after": "filtered by 'docs/after'"}))
    assert text.startswith("docs/clean, partition p, id 7, back to the source")
    assert "docs/source  id 7\n" in text
    assert "row 3 of /data/a.parquet\n" in text
    assert "1,234 bytes, version v" in text
    assert "docs/clean   id 7; project of source" in text
    assert "run one, committed by run two, 1970-01-01 00:00:00 UTC" in text
    assert "by io-1" in text
    assert "code abc, manifest 1-g0" in text
    assert text.splitlines()[-1] == "docs/after   filtered by 'docs/after'"


def test_rows_that_are_not_listed_are_counted_after_the_last_of_their_stage():
    lines = str(
        trace(CLEAN, replace(CLEAN, row=1), SOURCE, omitted={"docs/clean": 1500})
    ).splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.strip() == "and 1,500 more rows"]
    assert lines[place + 1].startswith("docs/source")


def manifest(id: str | None, partition: str | None = None) -> Any:
    sample = [] if id is None else [{"id": id}]
    return SimpleNamespace(
        pipeline="docs", stage="clean", partition=partition, keys=("id",), sample=sample
    )


@pytest.mark.parametrize(
    ("id", "partition", "arguments"),
    [
        ("7", None, "--id 7"),
        ("7", "a b", "--partition 'a b' --id 7"),
        ("it's", None, """--id 'it'"'"'s'"""),
        ("-7", None, "--id=-7"),
    ],
)
def test_the_command_of_a_trace_is_quoted(id, partition, arguments):
    command = trace_command(Store(Location("/s")), manifest(id, partition))
    assert command == f"vane-dagster trace docs/clean {arguments} --store /s"


@pytest.mark.parametrize("id", [None, "cut…", "a`b", "a\nb"])
def test_an_id_that_cannot_stand_in_a_command_has_none(id):
    assert trace_command(Store(Location("/s")), manifest(id)) is None
