"""``vane-dagster adopt``: keep stored rows in force after an edit that changes no result."""

from __future__ import annotations

import click

from vane_dagster.cli.definitions import FILE, MODULE, Definitions


@click.command()
@click.argument("stage")
@FILE
@MODULE
@click.option("--rows", default=200, show_default=True, type=click.IntRange(1), help="To compare.")
@click.option("--tolerance", default=0.0, show_default=True, help="Of floating-point numbers.")
@click.option("--undo", is_flag=True, help="Make the two definitions different again.")
def adopt(
    stage: str, file: str | None, module: str | None, rows: int, tolerance: float, undo: bool
) -> None:
    """Keeps the stored rows of STAGE, as docs/embedding, in force after an edit of its code.

    Computes some of them again, with the store and the compute resource of the definitions. Exit
    code 1: one came out otherwise, or something else than code or arguments changed; nothing was
    adopted.
    """
    definitions = Definitions(file, module)
    store, compute = definitions.resource("store"), definitions.resource("compute")
    given = {"tolerance": tolerance, "undo": undo, "store": store, "compute": compute}
    click.echo(definitions.stage(stage).adopt(rows, **given))
