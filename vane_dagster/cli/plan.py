"""``vane-dagster plan``: what a run would compute, why, and what it would cost."""

from __future__ import annotations

from typing import Any

import click

from vane_dagster.cli.definitions import Definitions, opened, with_definitions
from vane_dagster.cli.options import AS_JSON, PARTITIONS, STORE, print_json
from vane_dagster.orchestration.assets import PIPELINES


@click.command()
@click.argument("pipeline", required=False)
@with_definitions()
@click.option(
    "--select",
    help="Stages, such as clean,embedding+ (with all downstream stages) or +embedding (with all "
    "upstream stages). [default: all]",
)
@PARTITIONS
@STORE
@click.option("--force", is_flag=True, help="Plan a run with force in its config.")
@click.option(
    "--retry-quarantined", is_flag=True, help="Plan a run with retry_quarantined in its config."
)
@click.option("--rows", is_flag=True, help="Read the inputs to count rows exactly.")
@click.option(
    "--sample",
    type=click.IntRange(1),
    help="Compute this many rows of each new or edited stage, to measure their cost.",
)
@AS_JSON
def plan(
    definitions: Definitions,
    pipeline: str | None,
    store: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what a run of PIPELINE would compute, why, and what it would cost.

    Without --sample, a plan computes nothing and starts no cluster. Without PIPELINE, all pipelines
    are planned; with --json, the plans are then an object with the names of the pipelines, unless
    there is only one. The exit code is 1 if a partition cannot be planned.

    Example: vane-dagster plan docs -f definitions.py --select embedding+
    """
    is_one = pipeline or options["select"] or options["partitions"] or len(PIPELINES) < 2
    planned: list[Any] = [definitions.pipeline(pipeline)] if is_one else [*PIPELINES.values()]
    options["store"] = opened(store, definitions)
    options["compute"] = definitions.resource("compute", options["sample"] is not None)
    forecasts = {each.name: each.plan(**options) for each in planned}
    if as_json:
        plans = {name: forecast.to_dict() for name, forecast in forecasts.items()}
        print_json(plans.popitem()[1] if is_one else plans)
    else:
        click.echo("\n\n".join(map(str, forecasts.values())))
    if any(forecast.unplanned for forecast in forecasts.values()):
        raise SystemExit(1)
