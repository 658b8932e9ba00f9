"""``vane-dagster diff``: two versions of a stage's rows, side by side."""

from __future__ import annotations

from typing import Any

import click

from vane_dagster.cli.definitions import Definitions, stored_rows, with_definitions
from vane_dagster.cli.options import AS_JSON, PARTITIONS, STORE, print_json, texts
from vane_dagster.orchestration.diff import diff as compare


@click.command()
@click.argument("stage")
@click.option(
    "--between",
    nargs=2,
    required=True,
    metavar="A B",
    help="Two versions, each the id of a run, the root of a store, or `latest` (in force).",
)
@PARTITIONS
@click.option(
    "--columns",
    multiple=True,
    metavar="A,B,...",
    callback=texts,
    help="The columns to compare. [default: all common columns except the usage of prompts]",
)
@STORE
@click.option(
    "--tolerance",
    default=0.0,
    show_default=True,
    help="Permitted difference of floating-point numbers.",
)
@with_definitions(is_optional=True)
@AS_JSON
def diff(
    definitions: Definitions | None,
    stage: str,
    between: tuple[str, str],
    partitions: list[str] | None,
    store: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare two versions of the rows of STAGE, such as docs/embedding, by id.

    The command counts rows that are in one version only, equal, and different. For each column it
    shows what has changed, and some of the rows. It reads the store and calls no function.

    Example: vane-dagster diff docs/embedding --between 3f9c21aa latest
    """
    compared, keys, place = stored_rows(definitions, stage, partitions, store)
    difference = compare(compared, *between, partitions=keys, store=place, **options)
    print_json(difference.to_dict()) if as_json else click.echo(str(difference))
