"""``vane-dagster quarantine``: failed rows of a stage by error, and their retry."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import click

from vane_dagster._lazy import pc
from vane_dagster._texts import count, listed
from vane_dagster.cli.definitions import Definitions, stored_rows, with_definitions
from vane_dagster.cli.options import AS_JSON, PARTITIONS, STORE, print_json
from vane_dagster.orchestration.read import quarantine as failed_rows

_SHOWN = 3
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|\d+")
"""What differs in messages of one kind: numbers, addresses and quoted values."""


@click.command()
@click.argument("stage")
@PARTITIONS
@STORE
@click.option("--retry", is_flag=True, help="Compute the failed rows again, also downstream.")
@with_definitions(is_optional=True)
@AS_JSON
def quarantine(
    definitions: Definitions | None,
    stage: str,
    partitions: list[str] | None,
    store: str | None,
    retry: bool,
    as_json: bool,
) -> None:
    """List the quarantined rows of STAGE, such as docs/embedding, by kind of error.

    Messages that differ only in numbers and quoted values are one kind. The most frequent kind is
    first, with some ids and the partitions to run again. Partitions that a run gave up are last,
    with the run and their first failed rows.

    With --retry, a run computes these rows again, and the downstream rows made from them, with the
    store and the compute resource of the definitions. Rows that fail again are listed. If other
    rows of these stages are due too, for example after an edit, no run begins: the command fails
    and shows the plan.

    Example: vane-dagster quarantine docs/embedding --retry -f definitions.py
    """
    if retry and definitions is None:
        definitions = Definitions(None, None)
    target, keys, place = stored_rows(definitions, stage, partitions, store)
    if definitions is not None and retry:
        _retry(target, keys, place, definitions)
    groups = grouped(failed_rows(target, keys, store=place).to_pylist())
    if as_json:
        print_json(groups)
        return
    if not groups:
        click.echo("No row is quarantined.")
    for group in groups:
        click.echo(f"{count(group['rows'], 'row')}: {group['error']}: {group['message']}")
        texts = {"ids": group["ids"], "partitions": group["partitions"]}
        if len(group["partitions"]) > 1:
            pairs = zip(group["ids"], group["partition_of_ids"])
            texts["ids"] = [f"{id} (partition {key})" for id, key in pairs]
        for name, values in texts.items():
            if values not in ([], [None]):
                click.echo(f"  {name}: {listed([str(each) for each in values], _SHOWN)}")
        if group["failed_run"]:
            click.echo(
                f"  not committed: run {group['failed_run']} failed. Only its first failed "
                "rows are stored, and of equal rows one"
            )
    if not all(group["failed_run"] for group in groups):
        given = shlex.join(definitions.options) if definitions else "-f <your definitions>"
        words = f"vane-dagster quarantine {shlex.quote(stage)} --retry {given}"
        click.echo(f"Retry them: {words.rstrip()}")


def _retry(stage: Any, keys: list[str] | None, store: Any, given: Definitions) -> None:
    """Compute failed rows of a stage, and what follows from them.

    If other rows of these stages are due too, nothing is run.
    """
    place, options = "/".join(stage.key.path), shlex.join(given.options)
    rows = failed_rows(stage, keys, store=store)
    failed = pc.unique(rows.filter(rows["committed"])["partition"]).to_pylist()
    if not failed:
        return
    keys = [key for key in failed if key is not None] or None
    wanted: dict[str, Any] = {"select": f"{stage.name}+", "store": store}
    plan = stage.pipeline.plan(keys, **wanted)
    for name in [each.stage for each in plan.stages if each.up_to_date < each.partitions]:
        other = "/".join(stage.pipeline[name].key.path)
        raise click.ClickException(
            f"{other}: the stage is not up to date, so a retry would compute more than failed rows "
            f"and what follows from them. Nothing was computed. {plan}\n"
            f"If an edit changes no stored result, adopt it first: vane-dagster adopt {other} "
            f"{options}. Otherwise materialize {place}+"
        )
    with contextlib.redirect_stdout(sys.stderr):  # the result is what is still quarantined
        stage.pipeline.run(
            keys, **wanted, compute=given.resource("compute"), retry_quarantined=True
        )


def grouped(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the kinds of errors of quarantined rows, the most frequent first."""
    kinds: dict[tuple[str, str, str | None], list[dict[str, Any]]] = {}
    for row in rows:
        failed_run = None if row["committed"] else row["run_id"]
        kind = (row["error"], _VARYING.sub("#", row["message"] or ""), failed_run)
        kinds.setdefault(kind, []).append(row)
    groups = [
        {
            "error": error,
            "message": same[0]["message"],
            "rows": len(same),
            "ids": [row["id"] for row in same],
            "partition_of_ids": [row["partition"] for row in same],
            "failed_run": failed_run,
            "partitions": list(dict.fromkeys(row["partition"] for row in same)),
        }
        for (error, _, failed_run), same in kinds.items()
    ]
    return sorted(groups, key=lambda group: (group["failed_run"] is not None, -group["rows"]))
