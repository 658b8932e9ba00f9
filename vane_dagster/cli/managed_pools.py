"""The pools of a running cluster, for the commands that show and end them."""

from __future__ import annotations

import importlib
from typing import Any

import click

from vane_dagster.compute.actor_names import NAMESPACE
from vane_dagster.compute.client import brief, pool_managers
from vane_dagster.compute.connection import connect, connect_address
from vane_dagster.compute.local_head import LocalHead
from vane_dagster.compute.local_heads import running_heads
from vane_dagster.errors import ComputeError

_ANSWER_SECONDS = 30.0
NAME = click.option("--name", help="Which local head.  [default: default]")
ADDRESS = click.option("--address", help="Address of another Ray cluster, or of a local head.")


def is_list(context: click.Context, *options: object) -> bool:
    """Return whether a group is called for its list, whose options its commands do not take."""
    if context.invoked_subcommand and any(options):
        raise click.UsageError(f"write the options after {context.invoked_subcommand}")
    return context.invoked_subcommand is None


def end_pool(pool_manager: Any, pool: dict[str, Any], force: bool) -> bool:
    """End a pool, unless runs lease it."""
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


def managers_of(name: str | None, address: str | None) -> dict[str, Any]:
    """Return the pool managers of a running cluster, by name."""
    if name is not None and address is not None:
        raise click.UsageError("give either --name or --address, not both")
    if address is None:
        local = LocalHead(name="default" if name is None else name)
        if local.connect(NAMESPACE, start=False) is None:
            raise ComputeError(
                f"The local cluster {local.name!r} is not running, so no model is loaded and no "
                "server runs; `vane-dagster cluster list` shows the clusters that run"
            )
    else:
        if heads := [one.head for one in running_heads() if one.head.address == address]:
            connect(heads[0], NAMESPACE)  # it takes a token, and listens on 127.0.0.1 alone
        else:
            connect_address(address, {})
    return pool_managers()


def listed_pools(found: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
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
