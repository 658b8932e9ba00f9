"""``vane-dagster trace``: follow a row back to its source file, or forward to its results."""

from __future__ import annotations

import click

from vane_dagster.cli.definitions import Definitions, opened, with_definitions
from vane_dagster.cli.options import AS_JSON, PARTITION, STORE, print_json
from vane_dagster.orchestration.trace import trace as trace_row


@click.command()
@click.argument("stage")
@click.option("--id", required=True, help="The complete id of the row.")
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
    """Follow a row of STAGE, such as docs/enriched, back to the source file.

    Each step shows the row's values, shortened, and the messages of a prompt; the file and the
    row's number in it; the run, the workers, the time, the code version and the model. With
    --forward, the command follows a row of a stage, or of docs/source, to every row that was made
    from it. With -f or -m, it also reads the source: the values of its row, and the row in CSV
    files, JSON files and Iceberg tables.
    """
    found_in = stage if definitions is None else definitions.stage(stage, or_source=True)
    place = opened(store, definitions)
    result = trace_row(found_in, id, partition, forward=forward, store=place)
    print_json(result.to_dict()) if as_json else click.echo(str(result))
