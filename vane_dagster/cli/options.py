"""Options that several commands of ``vane-dagster`` take, declared once."""

from __future__ import annotations

import csv
import json
from typing import Any

import click


# Click's parameter types are generic in some versions only.
class JsonObject(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in some releases
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[str, Any]:
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"not JSON: {error}")
        if not isinstance(found, dict):
            self.fail("expected a JSON object, as '{\"anon\": true}'")
        return found


def texts(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[str] | None:
    """Return the texts of a repeatable option with comma-separated values; None without it.

    Double quotes keep a comma within a text, as in CSV: ``'"a,b",c'`` has two texts.
    """
    found: list[str] = []
    for value in values:
        try:
            (fields,) = csv.reader([value], skipinitialspace=True, strict=True)
        except (csv.Error, ValueError):
            raise click.BadParameter(
                f"{value!r} is no list; expected values such as a,b, and '\"a,b\"' for one with a "
                "comma",
                ctx,
                param,
            ) from None
        if not fields:
            raise click.BadParameter("the list is empty", ctx, param)
        found += [field.strip() for field in fields]
    return found or None


FILE = click.option("-f", "--python-file", "file", help="The file with the definitions.")
MODULE = click.option("-m", "--module-name", "module", help="The module with the definitions.")
STORE = click.option(
    "--store", help="The store's root. [default: $VANE_DAGSTER_STORE, else this user's]"
)
STORE_OR_DEFINED = click.option(
    "--store",
    help="The store's root. [default: with -f or -m that of the definitions, else "
    "$VANE_DAGSTER_STORE, else this user's]",
)
STORAGE_OPTIONS = click.option(
    "--storage-options", type=JsonObject(), default="{}", help="Options of fsspec, as JSON."
)
PARTITION = click.option("--partition", help="The partition's key. [default: none]")
PARTITIONS = click.option(
    "--partitions",
    multiple=True,
    metavar="A,B,...",
    callback=texts,
    help="Keys, such as a,b; with definitions also 2026-01-01..2026-01-31. [default: all]",
)
IDS = click.option(
    "--ids", multiple=True, metavar="A,B,...", callback=texts, help="Ids of input rows."
)
