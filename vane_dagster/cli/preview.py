"""``vane-dagster preview``: the first rows of a stage, on warm models."""

from __future__ import annotations

import json
from typing import Any

import click

from vane_dagster.cli.definitions import FILE, MODULE, Definitions
from vane_dagster.cli.output import table

_WIDTH = 40


@click.command()
@click.argument("stage")
@FILE
@MODULE
@click.option("--rows", default=10, show_default=True, type=click.IntRange(1), help="Input rows.")
@click.option("--partition", help="The partition, if the pipeline has any.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each row.")
def preview(
    stage: str,
    file: str | None,
    module: str | None,
    rows: int,
    partition: str | None,
    as_json: bool,
) -> None:
    """Computes the first rows of STAGE, as docs/embedding, and stores nothing.

    It uses the store and the compute resource of the definitions: stored rows of the stages
    upstream are read, and models stay loaded on the workers of a RayCompute.

    Example: vane-dagster preview docs/embedding -f definitions.py --rows 20
    """
    definitions = Definitions(file, module)
    store, compute = definitions.resource("store"), definitions.resource("compute")
    made = definitions.stage(stage).preview(rows, partition=partition, store=store, compute=compute)
    if as_json:
        for row in made.to_pylist():
            click.echo(json.dumps(row, default=str))
        return
    shown = [[_short(value) for value in row.values()] for row in made.to_pylist()]
    click.echo(table([made.column_names, *shown]))


def _short(value: Any) -> str:
    """Return a value on one line, with the beginning of a long one."""
    if isinstance(value, list) and len(value) > 4:
        return f"[{', '.join(map(_short, value[:3]))}, ... {len(value)} values]"
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
