"""``vane-dagster cluster``: list and stop the local Ray heads."""

from __future__ import annotations

import platform
import sys
import time
from typing import Any

import click

from vane_dagster._texts import duration, table
from vane_dagster.cli.options import AS_JSON, print_json
from vane_dagster.compute.local_head import HeadFolder, LocalHead
from vane_dagster.compute.local_heads import RunningHead, running_heads
from vane_dagster.compute.processes import drivers, marked
from vane_dagster.errors import ComputeError, names

_HEADER = (
    "NAME", "ENVIRONMENT", "ADDRESS", "PID", "UP", "CPUS", "GPUS", "DRIVERS", "IDLE",
    "STOPS IN",
)  # fmt: skip


@click.group()
def cluster() -> None:
    """The local Ray heads that LocalCluster starts."""


@cluster.command("list")
@AS_JSON
def list_heads(as_json: bool) -> None:
    """Lists the running heads of all your Python environments on this machine."""
    records = [_record(running) for running in running_heads()]
    if as_json:
        print_json(records)
    elif records:
        click.echo(table([_HEADER, *(_row(record) for record in records)]))
    else:
        click.echo("No local head is running. A run with RayCompute() starts one.")


@cluster.command()
@click.option("--name", help="Which head of this environment.  [default: default]")
@click.option("--address", help="Address of a head of any environment, from `cluster list`.")
@click.option("--all", "everything", is_flag=True, help="The heads of all environments.")
def stop(name: str | None, address: str | None, everything: bool) -> None:
    """Stops a head, with every model that is loaded there."""
    if (name is not None) + (address is not None) + everything > 1:
        raise click.UsageError("give one of --name, --address and --all")
    if address is None and not everything:
        local = LocalHead(name="default" if name is None else name)
        _stop(local, _who(local))
        return
    running = running_heads()
    chosen = [one for one in running if everything or one.head.address == address]
    if not chosen and not everything:
        addresses = names(one.head.address for one in running)
        raise ComputeError(f"No local head has the address {address!r}; running: {addresses}")
    for one in chosen:
        _stop(one.place, f"The {one}")
    if not chosen:
        click.echo("No local head is running: nothing to stop.")


def _stop(place: HeadFolder, who: str) -> None:
    head = place.find()
    connected = drivers(place.mark, head.address) if head else ()
    stopped = place.stop()
    if head is not None:
        at = "" if who.endswith(head.address) else f" at {head.address}"
        click.echo(f"{who}{at} was stopped, with all its workers.")
    elif stopped:
        click.echo(f"{who} has no record in {place.folder}; leftover processes of it were ended.")
    else:
        click.echo(f"{who} is not running: nothing to stop.")
    if connected:
        pids = ", ".join(map(str, sorted(connected)))
        click.echo(f"Warning: it was in use by processes {pids}.", err=True)


def _record(running: RunningHead) -> dict[str, Any]:
    """Return a head as plain values."""
    place, head = running.place, running.head
    processes = marked(place.mark)
    connected = drivers(place.mark, head.address)
    use = place.use()
    # A head that never stops has no watcher, and nothing records when its last driver left.
    stops_at = use.stops_at() if use and not connected else None
    return {
        "name": head.name,
        "environment": head.prefix,
        "address": head.address,
        "pid": head.pid,
        "started_at": head.started_at,
        "cpus": running.resources.get("CPU", 0.0),
        "gpus": running.resources.get("GPU", 0.0),
        "processes": len(processes),
        "drivers": sorted(connected),
        "idle_seconds": max(0.0, time.time() - use.last_used) if use and stops_at else None,
        "idle_minutes": use.idle_minutes if use else None,
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
        f"{record['cpus']:g}",
        f"{record['gpus']:g}",
        ", ".join(map(str, record["drivers"])) or "-",
        "-" if idle is None else duration(idle),
        "-" if stops_at is None else duration(max(0.0, stops_at - time.time())),
    )


def _who(local: LocalHead) -> str:
    python = f"Python {platform.python_version()}, Ray {local.ray_version}"
    return f"The Ray head {local.name!r} of {sys.prefix} ({python})"
