"""``vane-dagster trace``: follow a row back to its source file, or forward to its results."""

from __future__ import annotations

import click

from vane_dagster.cli.definitions import Definitions, opened, with_definitions
from vane_dagster.cli.options import AS_JSON, PARTITION, STORE, print_json
from vane_dagster.orchestration.trace import trace as trace_row


@click.command()
@click.argument("stage")
@click.option("--id", required=True, help="The row's id, in full.")
@PARTITION
@click.option("--forward", is_flag=True, help="Follow the row to all rows made from it.")
@STORE
@with_definitions(is_optional=True)
@AS_JSON
def trace(
    definitions: Definitions | None,
    stage: str,
    id: str,
    partition: str | None,
    forward: bool,
    store: str | None,
    as_json: bool,
) -> None:
    """Follows a row of STAGE, such as docs/enriched, back to the source file.

    Each step has the row's values, shortened, with the messages of a prompt; the file and the row's
    number in it; the run, the workers and the time, the code version and the model. With --forward
    it goes from a row of a stage, or of docs/source, to every row that was made of it. With -f or
    -m the definitions read the source: its row's values, and CSV and JSON files and Iceberg tables.
    """
    found_in = stage if definitions is None else definitions.stage(stage, or_source=True)
    place = opened(store, definitions)
    result = trace_row(found_in, id, partition, forward=forward, store=place)
    print_json(result.to_dict()) if as_json else click.echo(str(result))
