"""``vane-dagster adopt``: keep stored rows in force after an edit that changes no result."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from vane_dagster.cli.definitions import Definitions, with_definitions
from vane_dagster.cli.options import AS_JSON, PARTITIONS, print_json

_NEXT = "The next run computes what the present code has not"


@click.command()
@click.argument("stage")
@with_definitions()
@click.option(
    "--sample",
    default=200,
    show_default=True,
    type=click.IntRange(0),
    help="Number of rows to compare. 0 adopts the edit without a comparison.",
)
@click.option("--all", "every", is_flag=True, help="Compare every stored row.")
@PARTITIONS
@click.option(
    "--tolerance",
    default=0.0,
    show_default=True,
    help="Permitted difference of floating-point numbers.",
)
@click.option("--undo", is_flag=True, help="End the adoption.")
@AS_JSON
def adopt(
    definitions: Definitions, stage: str, sample: int, every: bool, as_json: bool, **options: Any
) -> None:
    """Keep the stored rows of STAGE, such as docs/embedding, in force after an edit of its code.

    The command computes a random sample of them again, with the store and the compute resource of
    the definitions. The exit code is 1, and nothing is adopted, if a row differs, or if something
    other than code, arguments or a prompt has changed.
    """
    given = {**definitions.resources(), **options}
    adoption = definitions.stage(stage).adopt(None if every else sample, **given)
    if as_json:
        print_json(asdict(adoption))
        return
    click.echo(f"undone: {adoption.since}. {_NEXT}" if options["undo"] else adoption)
