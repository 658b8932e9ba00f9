"""``vane-dagster pools``: list and evict the warm models of a cluster."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from vane_dagster.cli.managed_pools import (
    ADDRESS,
    NAME,
    end_pool,
    is_list,
    listed_pools,
    managers_of,
)
from vane_dagster.cli.output import duration, joined, table

_STATES = ("busy", "ready", "starting", "dead")


@click.group(invoke_without_command=True)
@NAME
@ADDRESS
@click.option("--json", "as_json", is_flag=True, help="As JSON, with every worker.")
@click.pass_context
def pools(context: click.Context, name: str | None, address: str | None, as_json: bool) -> None:
    """Lists the pools of warm models.

    Exit code 1: the cluster or a pool manager does not answer.
    """
    if not is_list(context, name, address, as_json):
        return
    listed, silent = listed_pools(managers_of(name, address))
    if as_json:
        click.echo(json.dumps(listed, indent=1))
    elif listed:
        click.echo(table([HEADER, *(row(pool) for pool in listed)]))
    elif not silent:
        click.echo("No pools: no model is loaded. A run that uses RayCompute makes them.")
    sys.exit(1 if silent else 0)


@pools.command()
@click.argument("identity", required=False)
@click.option("--all", "everything", is_flag=True, help="All pools.")
@click.option("--force", is_flag=True, help="Leased ones too; their runs construct them again.")
@NAME
@ADDRESS
def evict(
    identity: str | None,
    everything: bool,
    force: bool,
    name: str | None,
    address: str | None,
) -> None:
    """Ends the pool IDENTITY (its beginning is enough), or all, and frees what they hold.

    Exit code 1: there is no such pool, or runs lease it.
    """
    if (identity is None) == (not everything):
        raise click.UsageError("give the identity of one pool, or --all")
    found = managers_of(name, address)
    every, silent = listed_pools(found)
    listed = _chosen(every, identity)
    ended = [pool for pool in listed if end_pool(found[pool["keeper"]], pool, force)]
    for pool in ended:
        click.echo(f"Ended {pool['label']} ({pool['identity']}).")
    left = [pool for pool in listed if pool not in ended]
    for pool in left:
        runs = ", ".join(pool["leases"]) or "a run that has just begun"
        click.echo(
            f"{pool['label']} ({pool['identity']}) is leased by {runs}; --force ends it.", err=True
        )
    if not listed and not silent:
        click.echo("No pools: nothing to end.")
    sys.exit(1 if left or silent else 0)


def _chosen(listed: list[dict[str, Any]], identity: str | None) -> list[dict[str, Any]]:
    """Return the pools with an identity, or the only one with that prefix; all for None."""
    if identity is None:
        return listed
    known = {pool["identity"] for pool in listed}
    matches = {identity} & known or {i for i in known if i.startswith(identity)}
    if len(matches) != 1:
        are = f"are {len(matches)} pools that begin with" if matches else "is no pool"
        raise click.ClickException(f"there {are} {identity!r}; see `vane-dagster pools`")
    return [pool for pool in listed if pool["identity"] in matches]


HEADER = (
    "MODEL", "IDENTITY", "STATE", "ACTORS", "PIDS", "DEVICE", "NODE", "LEASES", "IDLE",
    "BATCHES", "LOAD",
)  # fmt: skip


def row(pool: dict[str, Any]) -> tuple[str, ...]:
    """Return a pool as a row of the table."""
    workers = pool["workers"]
    states = [worker["state"] for worker in workers]
    loads = [worker["load_seconds"] for worker in workers if worker.get("load_seconds")]
    counts = [f"{states.count(s)} {s}" for s in _STATES if s in states]
    return (
        pool["label"],
        pool["identity"],
        counts[0].split()[1] if len(counts) == 1 else ", ".join(counts),
        str(len(workers)),
        joined(worker.get("pid") for worker in workers),
        joined(worker.get("device") for worker in workers),
        joined(worker.get("node") for worker in workers),
        ", ".join(run[:8] for run in pool["leases"]) or "-",
        "-" if pool["leases"] else duration(pool["idle_seconds"]),
        str(sum(worker.get("batches", 0) for worker in workers)),
        f"{max(loads):.1f} s" if loads else "-",
    )
