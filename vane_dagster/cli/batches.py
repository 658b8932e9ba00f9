"""``vane-dagster batches``: batches of providers that are in flight, or have ended."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import click

from vane_dagster._texts import count
from vane_dagster.cli.definitions import Definitions
from vane_dagster.cli.options import FILE, MODULE
from vane_dagster.orchestration.batch_runs import BatchRuns
from vane_dagster.orchestration.range_runs import materialize
from vane_dagster.orchestration.read import open_store
from vane_dagster.orchestration.resources import LocalCompute
from vane_dagster.storage.batch_records import ProviderBatch


class _Found:
    """The pipeline that a command names, and its batches."""

    def __init__(self, name: str | None, file: str | None, module: str | None) -> None:
        definitions = Definitions(file, module)
        self.pipeline = definitions.pipeline(name)
        store, compute = definitions.resource("store"), definitions.resource("compute")
        self.runs = BatchRuns(self.pipeline, open_store(store, "batches"))
        self.resources = {"store": store, "compute": compute or LocalCompute()}


@click.group()
def batches() -> None:
    """Looks at batches of providers, of prompts with vd.Model(mode="batch")."""


def _command(function: Any) -> Any:
    """Declare a command with the arguments that all of them take."""
    for option in (MODULE, FILE, click.argument("pipeline", required=False)):
        function = option(function)
    return batches.command()(function)


def _list(pipeline: str | None, file: str | None, module: str | None) -> None:
    """Lists the batches of PIPELINE that the store knows, the latest last."""
    found = _Found(pipeline, file, module)
    rows = [(each, batch) for each in found.runs.every for batch in each.read()]
    for each, batch in sorted(rows, key=lambda row: row[1].at):
        click.echo(_line(f"{found.pipeline.name}/{each.stage}", batch))
    if not rows:
        click.echo("There is no batch.")


def _collect(pipeline: str | None, file: str | None, module: str | None) -> None:
    """Stores the answers of batches that have ended, and goes on with them.

    A run in this process materializes the partitions that wait for no other batch, with the stages
    downstream, and reports to the instance of $DAGSTER_HOME. Run it again after a failure.

    Example: vane-dagster batches collect docs -f definitions.py
    """
    found = _Found(pipeline, file, module)
    for each in found.runs.every:
        each.refresh()
        for batch in each.in_flight:
            click.echo(_line(f"{found.pipeline.name}/{each.stage}", batch))
    failed = False
    for run in found.runs.continuations()[0]:
        config = run.run_config(found.pipeline)
        where = (found.pipeline, run.stages, run.partitions, found.resources, config)
        with contextlib.redirect_stdout(sys.stderr):
            done = list(materialize(*where))
        failed |= not all(each.success for each in done)
        stages = ", ".join(run.stages)
        click.echo(f"ran {stages} in {count(len(run.partitions), 'partition')}")
    if failed:
        raise click.ClickException("a run has failed; its log is above")


@click.option("--batch", "names", multiple=True, help="The name of a batch. [default: all]")
def _cancel(
    pipeline: str | None, file: str | None, module: str | None, names: tuple[str, ...]
) -> None:
    """Cancels batches in flight. Answers that they have by then are kept, and paid for.

    The next run of their partitions asks for the others again.
    """
    found = _Found(pipeline, file, module)
    for each in found.runs.every:
        each.refresh()
        for batch in each.cancel(names or [batch.name for batch in each.in_flight]):
            click.echo(_line(f"{found.pipeline.name}/{each.stage}", batch))


for _name, _function in (("list", _list), ("collect", _collect), ("cancel", _cancel)):
    _function.__name__ = _name
    _command(_function)


def _line(stage: str, batch: ProviderBatch) -> str:
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(batch.at))
    text = f"{stage}: batch {batch.name}, {count(batch.requests, 'request')}, {at}: {batch.state}"
    if batch.ended_at:
        return text + "".join(f", {number:,} {status}" for status, number in batch.counts.items())
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(batch.expected))
    return f"{text}, expected by {until}" if batch.expected else text
