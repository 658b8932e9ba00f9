"""Options that several commands of ``vane-dagster`` take, declared once."""

from __future__ import annotations

import contextlib
import csv
import json
from typing import Any

import click


def texts(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[str] | None:
    """Return the texts of a repeatable option with comma-separated values; None without it.

    Double quotes keep a comma within a text, as in CSV: ``'"a,b",c'`` has two texts.
    """
    listed: list[str] = []
    for value in values:
        fields: list[str] = []
        with contextlib.suppress(csv.Error, ValueError):
            (fields,) = csv.reader([value], skipinitialspace=True, strict=True)
        if not fields:
            raise click.BadParameter(
                f"{value!r} is not a list; expected values such as a,b, and '\"a,b\"' for one with "
                "a comma",
                ctx,
                param,
            )
        listed += [field.strip() for field in fields]
    return listed or None


STORE = click.option(
    "--store",
    help="Root of the store. [default: the store of the definitions or of the dg project, else "
    "$VANE_DAGSTER_STORE, else the user's store]",
)
PARTITION = click.option("--partition", help="Key of the partition. [default: none]")
PARTITIONS = click.option(
    "--partitions",
    multiple=True,
    metavar="A,B,...",
    callback=texts,
    help="Keys of partitions, such as a,b; with definitions also ranges, such as "
    "2026-01-01..2026-01-31. [default: all]",
)
IDS = click.option(
    "--ids", multiple=True, metavar="A,B,...", callback=texts, help="Ids of input rows."
)
NAME = click.option("--name", help="Name of the local head.  [default: default]")
ADDRESS = click.option("--address", help="Address of another Ray cluster, or of a local head.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(value: Any, indent: int | None = 1) -> None:
    """Print the result of a command with `AS_JSON`."""
    click.echo(json.dumps(value, indent=indent, default=str))
