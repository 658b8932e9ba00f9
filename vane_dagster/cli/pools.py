"""``vane-dagster pools``: list and evict the warm models of a cluster."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import click

from vane_dagster.cli.output import table
from vane_dagster.compute.actor_names import NAMESPACE
from vane_dagster.compute.client import brief, pool_managers
from vane_dagster.compute.local_head import LocalHead
from vane_dagster.errors import ComputeError

_ANSWER_SECONDS = 30.0
_STATES = ("busy", "ready", "starting", "dead")
_NAME = click.option("--name", help="Which local head.  [default: default]")
_ADDRESS = click.option("--address", help="Address of another Ray cluster.")


@click.group(invoke_without_command=True)
@_NAME
@_ADDRESS
@click.option("--json", "as_json", is_flag=True, help="As JSON, with every worker.")
@click.pass_context
def pools(context: click.Context, name: str | None, address: str | None, as_json: bool) -> None:
    """Lists the pools of warm models.

    Exit code 1: the cluster or a pool manager does not answer.
    """
    context.obj = (name, address)
    if context.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError(f"--json is for the list, not for {context.invoked_subcommand}")
        return
    listed, silent = _listed(_pool_managers(name, address))
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
@_NAME
@_ADDRESS
@click.pass_obj
def evict(
    outer: tuple[str | None, str | None],
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
    found = _pool_managers(*(outer if name is None and address is None else (name, address)))
    every, silent = _listed(found)
    listed = _chosen(every, identity)
    ended = [pool for pool in listed if _end(found[pool["keeper"]], pool, force)]
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


def _end(pool_manager: Any, pool: dict[str, Any], force: bool) -> bool:
    ray: Any = importlib.import_module("ray")
    try:
        return bool(
            ray.get(pool_manager.evict.remote(pool["identity"], force), timeout=_ANSWER_SECONDS)
        )
    except ray.exceptions.RayError as error:
        raise ComputeError(
            f"{pool['keeper']} does not answer, so {pool['label']} ({pool['identity']}) may "
            f"not have ended: {brief(error)}. See `vane-dagster pools`"
        ) from error


def _pool_managers(name: str | None, address: str | None) -> dict[str, Any]:
    """Return the pool managers of a running cluster, by name.

    Raises:
        ComputeError: If the cluster is not running or not reachable.
    """
    if name is not None and address is not None:
        raise click.UsageError("give either --name or --address, not both")
    if address is None:
        local = LocalHead(name="default" if name is None else name)
        if local.connect(NAMESPACE, start=False) is None:
            raise ComputeError(
                f"The local cluster {local.name!r} is not running, so no model is loaded; "
                "`vane-dagster cluster list` shows those that run"
            )
    else:
        from vane_dagster.orchestration.resources import connect_address

        connect_address(address, {})
    return pool_managers()


def _listed(found: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the pools of all pool managers, and the names of managers that do not answer."""
    ray: Any = importlib.import_module("ray")
    listed, silent = [], []
    for name, pool_manager in found.items():
        try:
            answer = ray.get(pool_manager.pools.remote(), timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError as error:
            silent.append(name)
            click.echo(f"{name} does not answer: {brief(error)}", err=True)
        else:
            # The field keeps its former name, because scripts read the JSON.
            listed += [{"keeper": name, **pool} for pool in answer]
    return listed, silent


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
        _each(worker.get("pid") for worker in workers),
        _each(worker.get("device") for worker in workers),
        _each(worker.get("node") for worker in workers),
        ", ".join(run[:8] for run in pool["leases"]) or "-",
        "-" if pool["leases"] else _duration(pool["idle_seconds"]),
        str(sum(worker.get("batches", 0) for worker in workers)),
        f"{max(loads):.1f} s" if loads else "-",
    )


def _each(values: Any) -> str:
    """Join the distinct values, in order."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "-"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
