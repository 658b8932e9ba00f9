"""``vane-dagster plan``: what a run would compute, why, and what it would cost."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click


@click.command()
@click.argument("pipeline", required=False)
@click.option("-f", "--python-file", "file", help="The file with the definitions.")
@click.option("-m", "--module-name", "module", help="The module with the definitions.")
@click.option(
    "--select", help="Stages, as clean,embedding+ (with those downstream). [default: all]"
)
@click.option("--partitions", help="Keys, as 2026-01-01..2026-01-31 or a,b. [default: all]")
@click.option("--store", help="The store's root. [default: that of the definitions]")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def plan(
    pipeline: str | None,
    file: str | None,
    module: str | None,
    select: str | None,
    partitions: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Says what a run of PIPELINE would compute, why, and what it would cost.

    It computes nothing and starts no cluster. PIPELINE may be left out if there is only one.

    Example: vane-dagster plan docs -f definitions.py --select embedding+
    """
    if (file is None) == (module is None):
        raise click.UsageError("give the definitions, as -f definitions.py or -m my.definitions")
    loaded = _loaded(file, module)
    from vane_dagster.orchestration.assets import PIPELINES

    chosen = pipeline or next(iter(PIPELINES), "")
    if chosen not in PIPELINES or (pipeline is None and len(PIPELINES) > 1):
        known = ", ".join(sorted(PIPELINES)) or "none"
        raise click.UsageError(f"name one of the pipelines of the definitions: {known}")
    found = PIPELINES[chosen].plan(  # type: ignore[attr-defined]  # assets are of public pipelines
        partitions.split(",") if partitions else None,
        select=select,
        store=store if store is not None else _store(loaded),
    )
    click.echo(json.dumps(found.to_dict(), indent=1) if as_json else str(found))


def _loaded(file: str | None, module: str | None) -> ModuleType:
    """Import the definitions as Dagster does: the working folder and the file's are on the path."""
    sys.path.insert(0, os.getcwd())
    if file is not None:
        if not Path(file).is_file():
            raise click.UsageError(f"there is no file {file!r}")
        sys.path.insert(0, str(Path(file).resolve().parent))
        module = Path(file).stem
    assert module is not None
    return importlib.import_module(module)


def _store(loaded: ModuleType) -> Any:
    """Return the store among the resources of a module's definitions; None without one."""
    import dagster as dg

    from vane_dagster.orchestration.io_manager import FragmentStore

    for value in list(vars(loaded).values()):
        if type(value).__name__ == "LazyDefinitions":  # of @dg.definitions
            value = value()
        if isinstance(value, dg.Definitions):
            for resource in (value.resources or {}).values():
                if isinstance(resource, FragmentStore):
                    return resource.process_config_and_initialize()
    return None
