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
    help="Rows to draw. 0 compares none: the edit is adopted on your word.",
)
@click.option("--all", "every", is_flag=True, help="Compare every stored row.")
@PARTITIONS
@click.option(
    "--tolerance",
    default=0.0,
    show_default=True,
    help="Of floating-point numbers.",
)
@click.option("--undo", is_flag=True, help="Split what counts as one definition.")
@AS_JSON
def adopt(
    definitions: Definitions, stage: str, sample: int, every: bool, as_json: bool, **options: Any
) -> None:
    """Keeps the stored rows of STAGE, such as docs/embedding, in force after an edit of its code.

    Computes some of them again, with the store and the compute resource of the definitions. Exit
    code 1: one came out otherwise, or something else than code, arguments or a prompt changed;
    nothing was adopted.
    """
    given = {**definitions.resources(), **options}
    adoption = definitions.stage(stage).adopt(None if every else sample, **given)
    if as_json:
        print_json(asdict(adoption))
        return
    click.echo(f"undone: {adoption.since}. {_NEXT}" if options["undo"] else adoption)
