"""``vane-dagster cluster``: the local Ray head of this environment, seen and stopped."""

from __future__ import annotations

import importlib
import platform
import sys
import time
from typing import Any

import click

from vane_dagster.errors import VaneError
from vane_dagster.execute.cluster import Head, LocalHead, connect

_NAME = click.option(
    "--name", default="default", show_default=True, help="Which head of this environment."
)


@click.group()
def cluster() -> None:
    """The local Ray head that LocalCluster starts."""


@cluster.command()
@_NAME
def status(name: str) -> None:
    """Says whether the head runs, and what it has free. Exit code 1: it does not run."""
    local = LocalHead(name=name)
    head = local.find()
    if head is None:
        click.echo(f"{_who(local)} is not running. A run that uses LocalCluster starts it.")
        click.echo(f"State folder: {local.folder}")
        sys.exit(1)
    total, free = _resources(head)
    click.echo(f"{_who(local)} is running.")
    click.echo(f"Address:      {head.address} (this machine only, by token)")
    click.echo(f"Up for:       {_duration(time.time() - head.started_at)}")
    click.echo(f"State folder: {local.folder}")
    click.echo(f"Ray's logs:   {head.session_dir}/logs")
    click.echo("Free of total:")
    for resource in sorted(total):
        if not resource.startswith("node:"):
            amounts = (_amount(resource, of.get(resource, 0.0)) for of in (free, total))
            click.echo(f"  {resource}: {' of '.join(amounts)}")


@cluster.command()
@_NAME
def stop(name: str) -> None:
    """Stops the head, with every model that is loaded there."""
    local = LocalHead(name=name)
    head = local.find()
    stopped = local.stop()
    if head is not None:
        click.echo(f"{_who(local)} at {head.address} was stopped, with all its workers.")
    elif stopped:
        click.echo(f"{_who(local)} was not running; leftover processes of it were ended.")
    else:
        click.echo(f"{_who(local)} is not running: nothing to stop.")


def _who(local: LocalHead) -> str:
    python = f"Python {platform.python_version()}, Ray {local.ray_version}"
    return f"The Ray head {local.name!r} of {sys.prefix} ({python})"


def _resources(head: Head) -> tuple[dict[str, float], dict[str, float]]:
    """Total and free resources of a running head."""
    try:
        connect(head)
    except VaneError as error:
        raise click.ClickException(str(error)) from error
    ray: Any = importlib.import_module("ray")
    try:
        return ray.cluster_resources(), ray.available_resources()
    finally:
        ray.shutdown()


def _amount(resource: str, value: float) -> str:
    return f"{value / 2**30:.1f} GiB" if "memory" in resource else f"{value:g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    shown = [f"{value} {unit}" for value, unit in parts if value][:2]
    return " ".join(shown) or "0 s"
