"""``vane-dagster pools``: the warm models and servers of a cluster: list, logs, address, end."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from typing import Any

import click

from vane_dagster._texts import duration, table
from vane_dagster.cli.options import ADDRESS, AS_JSON, NAME, print_json
from vane_dagster.compute.actor_names import actor_names
from vane_dagster.compute.client import (
    PoolManagerClient,
    ask_pool_managers,
    ask_worker,
    pool_managers,
)
from vane_dagster.compute.connection import connect, connect_address
from vane_dagster.compute.local_head import HeadFolder, LocalHead
from vane_dagster.compute.local_heads import running_heads
from vane_dagster.errors import ComputeError

_Pool = dict[str, Any]
_POOL = click.argument("pool")


@click.group(invoke_without_command=True)
@NAME
@ADDRESS
@AS_JSON
@click.pass_context
def pools(context: click.Context, name: str | None, address: str | None, as_json: bool) -> None:
    """List the pools of warm models and model servers.

    The exit code is 1 if the cluster or a pool manager does not answer.
    """
    if context.invoked_subcommand:
        if name or address or as_json:
            raise click.UsageError(f"write the options after {context.invoked_subcommand}")
        return
    listed = _listed(name, address)
    if as_json:
        print_json(listed)
    elif listed:
        click.echo(table([HEADER, *(row(pool) for pool in listed)]))
    else:
        click.echo("No pools: no model is loaded. A run that uses RayCompute makes them.")


@pools.command()
@click.argument("pool", required=False)
@click.option("--all", "everything", is_flag=True, help="End all pools.")
@click.option(
    "--force", is_flag=True, help="End leased pools too; their runs construct the models again."
)
@NAME
@ADDRESS
def evict(
    pool: str | None, everything: bool, force: bool, name: str | None, address: str | None
) -> None:
    """End POOL, or all pools, and free their resources. A server finishes its requests first.

    The exit code is 1 if there is no such pool, or if runs lease it.
    """
    if (pool is None) == (not everything):
        raise click.UsageError("give one pool, or --all")
    every = _listed(name, address)
    listed = every if pool is None else _chosen(every, pool)
    identity = None if pool is None else listed[0]["identity"]
    ended = ask_pool_managers("evict", identity, force)
    left = [one for one in listed if one["identity"] not in ended[one["keeper"]]]
    for one in listed:
        runs = ", ".join(one["leases"]) or "a run that has just begun"
        text = f"{_shown(one)} is leased by {runs}; --force ends it."
        click.echo(text if one in left else f"Ended {_shown(one)}.", err=one in left)
    if not listed:
        click.echo("No pools: nothing to end.")
    sys.exit(1 if left else 0)


@pools.command()
@_POOL
@click.option("--lines", default=100, show_default=True, type=click.IntRange(1), help="Most lines.")
@NAME
@ADDRESS
@AS_JSON
def logs(pool: str, lines: int, name: str | None, address: str | None, as_json: bool) -> None:
    """Print the log of each worker of POOL, or of its server, even while it starts.

    The log has the lines of all runs. Secrets are masked.
    """
    workers = _chosen(_listed(name, address), pool)[0]["workers"]
    texts = {worker["name"]: ask_worker(worker["name"], "log", lines) for worker in workers}
    if as_json:
        print_json(texts)
        return
    for worker, text in texts.items():
        if len(workers) > 1:
            click.echo(f"==> {worker} <==")
        click.echo(text)


@pools.command()
@_POOL
@AS_JSON
@click.option(
    "--api-key", "with_key", is_flag=True, help="Print its API key too, on the next line."
)
@NAME
@ADDRESS
def endpoint(
    pool: str, as_json: bool, with_key: bool, name: str | None, address: str | None
) -> None:
    """Print the URL of a ready replica of the server POOL, preferably on this machine.

    The command takes no lease, so the server may stop at any time.
    """
    server = _chosen(_listed(name, address), pool)[0]
    if not server["server"]:
        raise click.ClickException(f"{_shown(server)} is not a server")
    own = socket.gethostname()
    for worker in sorted(server["workers"], key=lambda worker: worker.get("node") != own):
        if (info := ask_worker(worker["name"], "server_endpoint")) is not None:
            break
    else:
        raise click.ClickException(f"{_shown(server)} has no ready replica: it is {_state(server)}")
    key = info.pop("api_key")
    if as_json:
        print_json({**info, **({"api_key": key} if with_key else {})})
        return
    click.echo(info["url"])
    if with_key:
        click.echo(key)


def local_head(name: str | None, address: str | None) -> HeadFolder | None:
    """Return the local head of some options; None for another cluster."""
    if name is not None and address is not None:
        raise click.UsageError("give either --name or --address, not both")
    if address is None:
        return LocalHead(name="default" if name is None else name)
    return next((place for place, head in running_heads() if head.address == address), None)


def _listed(name: str | None, address: str | None) -> list[_Pool]:
    """Connect to a running cluster, and return the pools of its pool managers."""
    place = local_head(name, address)
    if isinstance(place, LocalHead):
        if place.connect(start=False) is None:
            raise ComputeError(
                f"The local cluster {place.name!r} is not running, so no model is loaded and no "
                "server runs; `vane-dagster cluster list` shows the clusters that run"
            )
    elif place is not None and (head := place.find()) is not None:
        connect(head)  # it takes a token, and listens on 127.0.0.1 alone
    else:
        connect_address(address, {})
    if actor_names() and not pool_managers():
        PoolManagerClient()  # starts one, which adopts the workers
    # The field keeps its former name, because scripts read the JSON.
    listed = ask_pool_managers("pools").items()
    return [{"keeper": name, **pool} for name, pools in listed for pool in pools]


def _chosen(listed: list[_Pool], text: str) -> list[_Pool]:
    """Return the pool of a name or an identity, whose beginning is enough."""
    matches = [p for p in listed if text in (p["identity"], p["server"], p["label"])]
    matches = matches or [pool for pool in listed if pool["identity"].startswith(text)]
    if len({pool["identity"] for pool in matches}) != 1:
        are = f"are {len(matches)} pools" if matches else "is no pool"
        known = ", ".join(map(_shown, matches or listed)) or "none"
        raise click.ClickException(
            f"there {are} {text!r}; give the name of one, or the start of its identity: {known}"
        )
    return matches


def _shown(pool: _Pool) -> str:
    return f"{pool['label']} ({pool['identity']})"


def joined(values: Iterable[object]) -> str:
    """Join the distinct values, in order."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "-"


def _state(pool: _Pool) -> str:
    """Return the states of a pool's workers, with their numbers if they differ."""
    states = [worker.get("server", worker)["state"] for worker in pool["workers"]]
    counts = [f"{states.count(state)} {state}" for state in sorted({*states})]
    return ", ".join(counts) if len(counts) > 1 else (states or ["empty"])[0]


HEADER = (
    "POOL", "STAGES", "IDENTITY", "STATE", "ACTORS", "PIDS", "DEVICE", "NODE", "URL", "LEASES",
    "IDLE", "BATCHES", "LOAD",
)  # fmt: skip


def row(pool: _Pool) -> tuple[str, ...]:
    """Return a pool as a row of the table."""
    workers = pool["workers"]
    loads = [worker["load_seconds"] for worker in workers if worker.get("load_seconds")]
    return (
        pool["label"],
        joined(pool["stages"]),
        pool["identity"],
        _state(pool),
        str(len(workers)),
        *(joined(worker.get(name) for worker in workers) for name in ("pid", "device", "node")),
        joined(worker.get("server", {}).get("url") for worker in workers),
        ", ".join(run[:8] for run in pool["leases"]) or "-",
        "-" if pool["leases"] else duration(pool["idle_seconds"]),
        str(sum(worker.get("batches", 0) for worker in workers)),
        f"{max(loads):.1f} s" if loads else "-",
    )
