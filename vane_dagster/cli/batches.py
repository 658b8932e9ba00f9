"""``vane-dagster batches``: batches of providers that are in flight, or have ended."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict

import click

from vane_dagster._texts import count, minute
from vane_dagster.cli.definitions import Definitions, opened, with_definitions
from vane_dagster.cli.options import AS_JSON, print_json
from vane_dagster.orchestration.batch_runs import BatchRuns
from vane_dagster.orchestration.plain_run import run as run_plain
from vane_dagster.storage.batch_records import ProviderBatch

PIPELINE = click.argument("pipeline", required=False)


@click.group()
def batches() -> None:
    """Manage batches of providers, which prompts with vd.Model(mode="batch") submit."""


def _runs(definitions: Definitions, pipeline: str | None) -> BatchRuns:
    return BatchRuns(definitions.pipeline(pipeline), opened(None, definitions))


@batches.command("list")
@PIPELINE
@with_definitions()
@AS_JSON
def list_batches(definitions: Definitions, pipeline: str | None, as_json: bool) -> None:
    """List the batches of PIPELINE that are recorded in the store, the latest last."""
    runs = _runs(definitions, pipeline)
    batches = [(batch.at, each.stage, batch) for each in runs.every for batch in each.read()]
    batches.sort(key=lambda each: each[0])
    if as_json:
        print_json([{"stage": stage, **asdict(batch)} for _, stage, batch in batches])
        return
    for _, stage, batch in batches:
        click.echo(_line(stage, batch))
    if not batches:
        click.echo("There is no batch.")


@batches.command()
@PIPELINE
@with_definitions()
def collect(definitions: Definitions, pipeline: str | None) -> None:
    """Store the answers of batches that have ended, and continue their partitions.

    A run in this process computes the partitions that do not wait for another batch, and their
    downstream stages. The next Dagster run reports them. After a failure, run the command again.

    Example: vane-dagster batches collect docs -f definitions.py
    """
    target, runs = definitions.pipeline(pipeline), _runs(definitions, pipeline)
    for each in runs.every:
        each.refresh()
        for batch in each.in_flight:
            click.echo(_line(each.stage, batch))
    for run in runs.continuations()[0]:
        keys = [key for key in run.partitions if key is not None] or None
        with contextlib.redirect_stdout(sys.stderr):
            run_plain(target, keys, run.stages, **definitions.resources(), **run.options)
        where = count(len(run.partitions), "partition")
        click.echo(f"ran {', '.join(run.stages)} in {where}")


@batches.command()
@PIPELINE
@with_definitions()
@click.option("--batch", "names", multiple=True, help="Name of a batch. [default: all]")
def cancel(definitions: Definitions, pipeline: str | None, names: tuple[str, ...]) -> None:
    """Cancel batches in flight. Their answers so far are paid for and kept.

    collect and the sensor do not continue cancelled batches. To request the missing answers, run
    the partitions.
    """
    for each in _runs(definitions, pipeline).every:
        each.refresh()
        for batch in each.cancel(names or [batch.name for batch in each.in_flight]):
            click.echo(_line(each.stage, batch))


def _line(stage: str, batch: ProviderBatch) -> str:
    text = f"{stage}: batch {batch.name}, {count(batch.requests, 'request')}, {minute(batch.at)}"
    text += f": {batch.state}"
    if batch.ended_at:
        return text + "".join(f", {number:,} {status}" for status, number in batch.counts.items())
    return f"{text}, expected by {minute(batch.expected)}" if batch.expected else text
