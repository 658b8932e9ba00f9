"""``vane-dagster advise``: which stages limited a run, and what would shorten it."""

from __future__ import annotations

import click

from vane_dagster.cli.options import AS_JSON, print_json
from vane_dagster.orchestration.event_log import summaries


@click.command()
@click.argument("run")
@AS_JSON
def advise(run: str, as_json: bool) -> None:
    """Show which stages limited RUN, and what would shorten it.

    RUN is the id of a Dagster run, or its beginning, in the instance of $DAGSTER_HOME. The command
    prints the summary of each step of the run: its stages, with the share of time in which their
    workers computed, waited for input, waited for room in memory, and loaded.
    """
    steps = summaries(run)
    if not steps:
        raise click.ClickException(
            f"run {run!r} has no summary of a pipeline: it only observed or checked, failed before "
            "it computed, was stopped, or still runs. Its log has the error, its materializations "
            "the results"
        )
    if as_json:
        print_json({step: figures for step, (_, figures) in steps.items()})
        return
    for step, (text, _) in steps.items():
        click.echo("\n".join([step, text.strip("~\n"), ""]))
