"""``vane-dagster cluster``: list and stop the local Ray heads."""

from __future__ import annotations

import time
from typing import Any

import click

from vane_dagster._texts import duration, table
from vane_dagster.cli.options import AS_JSON, print_json
from vane_dagster.cli.pools import local_head
from vane_dagster.compute.local_head import Head, HeadFolder
from vane_dagster.compute.local_heads import running_heads
from vane_dagster.compute.processes import drivers, marked
from vane_dagster.errors import ComputeError, names

_HEADER = (
    "NAME", "ENVIRONMENT", "ADDRESS", "PID", "UP", "OPTIONS", "DRIVERS", "IDLE", "STOPS IN",
)  # fmt: skip


@click.group()
def cluster() -> None:
    """Manage the local Ray heads, which LocalCluster starts."""


@cluster.command("list")
@AS_JSON
def list_heads(as_json: bool) -> None:
    """List the running heads of all your Python environments on this machine."""
    records = [_record(*running) for running in running_heads()]
    if as_json:
        print_json(records)
    elif records:
        click.echo(table([_HEADER, *(_row(record) for record in records)]))
    else:
        click.echo("No local head is running. A run with RayCompute() starts one.")


@cluster.command()
@click.option("--name", help="Name of a head of this environment.  [default: default]")
@click.option("--address", help="Address of a head of any environment, from `cluster list`.")
@click.option("--all", "everything", is_flag=True, help="Stop the heads of all environments.")
def stop(name: str | None, address: str | None, everything: bool) -> None:
    """Stop a head and all models that are loaded there."""
    if everything and (name or address):
        raise click.UsageError("give one of --name, --address and --all")
    running = running_heads()
    chosen = [place for place, _ in running] if everything else [local_head(name, address)]
    for place in chosen:
        if place is None:
            addresses = names(head.address for _, head in running)
            raise ComputeError(f"No local head has the address {address!r}; running: {addresses}")
        _stop(place, name or "default")
    if not chosen:
        click.echo("No local head is running: nothing to stop.")


def _stop(place: HeadFolder, name: str) -> None:
    head = place.find()
    stopped = place.stop()
    if head is not None:
        who = f"The Ray head {head.name!r} of {head.prefix} at {head.address}"
        click.echo(f"{who} was stopped, with all its workers.")
    elif stopped:
        click.echo(f"{name!r} has no record in {place.folder}; leftover processes were ended.")
    else:
        click.echo(f"The Ray head {name!r} of this environment is not running: nothing to stop.")


def _record(place: HeadFolder, head: Head) -> dict[str, Any]:
    """Return a head as plain values."""
    connected, use = drivers(place.mark, head.address), place.use()
    # A head that never stops has no watcher, and nothing records when its last driver left.
    stops_at = None if connected else use.stops_at()
    return {
        "name": head.name,
        "environment": head.prefix,
        "address": head.address,
        "pid": head.pid,
        "started_at": head.started_at,
        "options": head.settings,
        "processes": len(marked(place.mark)),
        "drivers": sorted(connected),
        "idle_seconds": max(0.0, time.time() - use.last_used) if stops_at else None,
        "idle_minutes": use.idle_minutes,
        "stops_at": stops_at,
        "folder": str(place.folder),
        "logs": f"{head.session_dir}/logs",
    }


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    """Return a head as a row of the table."""
    idle, stops_at = record["idle_seconds"], record["stops_at"]
    return (
        record["name"] or "-",
        record["environment"],
        record["address"],
        str(record["pid"]),
        duration(time.time() - record["started_at"]),
        " ".join(record["options"]) or "-",
        ", ".join(map(str, record["drivers"])) or "-",
        "-" if idle is None else duration(idle),
        "-" if stops_at is None else duration(max(0.0, stops_at - time.time())),
    )
