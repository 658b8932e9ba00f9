"""``vane-dagster quarantine``: the failed rows of a stage, grouped by their error, and a retry."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import click

from vane_dagster._lazy import pc
from vane_dagster._texts import count
from vane_dagster.cli.definitions import FILE, MODULE, Definitions
from vane_dagster.cli.store import JsonObject, opened
from vane_dagster.orchestration.read import quarantine as failed_rows

_SHOWN = 3
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|\d+")
"""What differs in messages of one kind: numbers, addresses and quoted values."""


@click.command()
@click.argument("stage")
@click.option("--partition", "partitions", multiple=True, help="A partition's key. Default: all.")
@click.option("--store", help="The store's root. Default: $VANE_DAGSTER_STORE, else this user's.")
@click.option("--storage-options", type=JsonObject(), default="{}", help="For fsspec, as JSON.")
@click.option("--retry", is_flag=True, help="Compute them again, and what is made of them.")
@FILE
@MODULE
@click.option("--json", "as_json", is_flag=True, help="As JSON, with all ids.")
def quarantine(
    stage: str,
    partitions: tuple[str, ...],
    store: str | None,
    storage_options: dict[str, Any],
    retry: bool,
    file: str | None,
    module: str | None,
    as_json: bool,
) -> None:
    """Lists the quarantined rows of STAGE, as docs/embedding, by the kind of their error.

    Messages that differ in numbers and quoted values alone are of one kind. The most frequent kind
    is first, with some ids and the partitions to run again.

    With --retry, a run computes these rows again, and in the stages downstream what follows from
    them, with the store and the compute resource of the definitions. Those that fail again are
    listed.

    Example: vane-dagster quarantine docs/embedding --retry -f definitions.py
    """
    found: Any = stage
    place: Any = None
    if retry:
        if store is not None or storage_options:
            raise click.UsageError(
                "leave out --store and --storage-options: --retry uses the store of the definitions"
            )
        definitions = Definitions(file, module)
        found, place = definitions.stage(stage), definitions.resource("store")
        _retry(found, [*partitions] or None, place, definitions.resource("compute"))
    else:
        place = opened(store, storage_options)
    rows = failed_rows(found, [*partitions] or None, store=place).to_pylist()
    groups = grouped(rows)
    if as_json:
        click.echo(json.dumps(groups, indent=1, default=str))
    elif not groups:
        click.echo("No row is quarantined.")
    for group in () if as_json else groups:
        click.echo(f"{count(group['rows'], 'row')}: {group['error']}: {group['message']}")
        click.echo(f"  ids: {_some(group['ids'])}")
        if group["partitions"] != [None]:
            click.echo(f"  partitions: {_some(group['partitions'])}")
    if groups and not as_json:
        click.echo(f"Retry them: vane-dagster quarantine {stage} --retry -f definitions.py")


def _retry(stage: Any, partitions: Sequence[str] | None, store: Any, compute: Any) -> None:
    """Run the partitions of a stage that have failed rows."""
    rows = failed_rows(stage, partitions, store=store)
    keys = pc.unique(rows["partition"]).to_pylist()
    if not keys:
        return
    with contextlib.redirect_stdout(sys.stderr):  # the result is what is still quarantined
        stage.pipeline.run(
            None if keys == [None] else keys,
            select=f"{stage.name}+",
            store=store,
            compute=compute,
            retry_quarantined=True,
        )


def grouped(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the kinds of errors of quarantined rows, the most frequent first.

    Args:
        rows: The rows, as of `vane_dagster.quarantine`.
    """
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        kind = (row["error"], _VARYING.sub("#", row["message"] or ""))
        new = {
            "error": row["error"],
            "message": row["message"],
            "rows": 0,
            "ids": [],
            "partitions": [],
        }
        group = groups.setdefault(kind, new)
        group["rows"] += 1
        group["ids"].append(row["id"])
        if row["partition"] not in group["partitions"]:
            group["partitions"].append(row["partition"])
    return sorted(groups.values(), key=lambda group: -group["rows"])


def _some(values: Sequence[Any]) -> str:
    more = f" and {len(values) - _SHOWN:,} more" if len(values) > _SHOWN else ""
    return ", ".join(map(str, values[:_SHOWN])) + more
