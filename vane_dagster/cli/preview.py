"""``vane-dagster preview``: some rows of a stage, on warm models."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from typing import Any

import click

from vane_dagster.cli.definitions import Definitions, with_definitions
from vane_dagster.cli.options import AS_JSON, IDS, PARTITION, print_json
from vane_dagster.pipeline.preview import FailedRow


@click.command()
@click.argument("stage")
@with_definitions()
@click.option(
    "--rows", default=10, show_default=True, type=click.IntRange(1), help="Number of input rows."
)
@PARTITION
@IDS
@click.option("--where", help="SQL condition on the stage's input.")
@click.option("--reload", is_flag=True, help="Construct edited classes again.")
@AS_JSON
def preview(definitions: Definitions, stage: str, as_json: bool, **options: Any) -> None:
    """Compute some rows of STAGE, such as docs/embedding, and store nothing.

    It uses the store and the compute resource of the definitions: stored rows of the stages
    upstream are read, and models stay loaded on the workers of a RayCompute.

    Example: vane-dagster preview docs/embedding -f definitions.py --rows 20
    """
    given = {**definitions.resources(), **options}
    with contextlib.redirect_stdout(sys.stderr):  # what code prints is not a result
        made = definitions.stage(stage).preview(**given)
    if not as_json:
        click.echo(str(made))
        return
    for place in made.places():
        row = asdict(place) if isinstance(place, FailedRow) else made.table.slice(place, 1)
        print_json(row if isinstance(row, dict) else row.to_pylist()[0], indent=None)
