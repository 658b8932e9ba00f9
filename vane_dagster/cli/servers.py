"""``vane-dagster servers``: list the model servers of a cluster, read their logs, stop them."""

from __future__ import annotations

import codecs
import json
import socket
import sys
import time
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
from vane_dagster.cli.output import duration, table
from vane_dagster.compute.actor_names import actor_names
from vane_dagster.compute.client import ask_worker

_POLL_SECONDS = 0.5
_REFRESH_SECONDS = 5.0
_PART_BYTES = 2**20
_STOP_SECONDS = 180.0
_SERVER = click.argument("server")


@click.group(invoke_without_command=True)
@NAME
@ADDRESS
@click.option("--json", "as_json", is_flag=True, help="As JSON, as `pools` prints it.")
@click.pass_context
def servers(context: click.Context, name: str | None, address: str | None, as_json: bool) -> None:
    """Lists the model servers.

    The commands take the name of a server as SERVER, or the beginning of its identity.

    Exit code 1: the cluster or a pool manager does not answer.
    """
    if not is_list(context, name, address, as_json):
        return
    listed, silent = _listed(managers_of(name, address))
    if as_json:
        click.echo(json.dumps(listed, indent=1))
    elif listed:
        click.echo(table([HEADER, *(row for pool in listed for row in rows(pool))]))
    elif not silent:
        click.echo("No servers: none runs. A run that uses RayCompute starts those that it needs.")
    sys.exit(1 if silent else 0)


@servers.command()
@_SERVER
@click.option("-f", "--follow", is_flag=True, help="Go on until the server stops.")
@click.option("--lines", default=100, show_default=True, type=click.IntRange(0), help="At most.")
@NAME
@ADDRESS
def logs(server: str, follow: bool, lines: int, name: str | None, address: str | None) -> None:
    """Prints the log of SERVER, also while it starts; secrets in it are masked.

    Several replicas are told apart by headings. Exit code 1: no such server runs.
    """
    found = managers_of(name, address)
    pool = _chosen(found, server)
    readers = {worker: _LogReader(worker) for worker in _workers(pool)}
    last = "" if len(readers) > 1 else next(iter(readers), "")

    def show(worker: str, text: str) -> str:
        if text:
            heading = f"==> {_replica(pool, worker)} <==\n" * (worker != last)
            click.echo(heading + text, nl=False)
        return worker if text else last

    for worker, reader in readers.items():
        end = reader.read(-_PART_BYTES).splitlines(keepends=True)
        last = show(worker, "".join(end[-lines:] if lines else ()))
    refresh_at = time.monotonic() + _REFRESH_SECONDS
    ended_at = 0.0
    while follow and (readers or time.monotonic() < ended_at + _REFRESH_SECONDS):
        time.sleep(_POLL_SECONDS)
        for worker, reader in list(readers.items()):
            last = show(worker, reader.read())
            if reader.has_ended:  # a run may be about to replace it
                del readers[worker]
                ended_at = time.monotonic()
        if not readers or time.monotonic() >= refresh_at:
            refresh_at = time.monotonic() + _REFRESH_SECONDS
            for worker in _live_workers(found, pool["identity"]):
                readers.setdefault(worker, _LogReader(worker))
    if follow:
        click.echo(f"{pool['label']} ({pool['identity']}) runs no longer.", err=True)


@servers.command()
@_SERVER
@click.option("--force", is_flag=True, help="Although runs lease it; they start it again.")
@NAME
@ADDRESS
def stop(server: str, force: bool, name: str | None, address: str | None) -> None:
    """Stops SERVER and frees what it holds, after it has finished its requests.

    Exit code 1: no such server runs, runs lease it, or it has not ended after three minutes.
    """
    found = managers_of(name, address)
    pool = _chosen(found, server)
    shown = f"{pool['label']} ({pool['identity']})"
    if not end_pool(found[pool["keeper"]], pool, force):
        runs = ", ".join(pool["leases"]) or "a run that has just begun"
        raise click.ClickException(f"{shown} is leased by {runs}; --force stops it")
    workers = set(_workers(pool))
    deadline = time.monotonic() + _STOP_SECONDS
    while workers & set(actor_names()):
        if time.monotonic() > deadline:
            raise click.ClickException(
                f"{shown} has not ended after {_STOP_SECONDS:g} seconds; it may still finish "
                "requests. It will be killed when its drain_timeout_s is over"
            )
        time.sleep(_POLL_SECONDS)
    click.echo(f"Stopped {shown}.")


@servers.command()
@_SERVER
@click.option("--json", "as_json", is_flag=True, help="As JSON, with gRPC address and model.")
@click.option("--api-key", "with_key", is_flag=True, help="With its key, on a line of its own.")
@NAME
@ADDRESS
def endpoint(
    server: str, as_json: bool, with_key: bool, name: str | None, address: str | None
) -> None:
    """Prints the URL of a ready replica of SERVER: on this machine if there is one.

    It takes no lease, so the server may stop at any time. Exit code 1: none is ready.
    """
    pool = _chosen(managers_of(name, address), server)
    own = socket.gethostname()
    ready = sorted(
        (worker for worker in pool["workers"] if _status(worker).get("state") == "ready"),
        key=lambda worker: worker.get("node") != own,
    )
    for worker in ready:
        if (info := ask_worker(worker["name"], "server_endpoint")) is not None:
            break
    else:
        states = sorted({_state(worker) for worker in pool["workers"]})
        raise click.ClickException(
            f"{pool['label']} ({pool['identity']}) has no ready replica: "
            f"{', '.join(states) or 'none runs'}; see `vane-dagster servers`"
        )
    key = info.pop("api_key")
    if as_json:
        click.echo(json.dumps({**info, **({"api_key": key} if with_key else {})}, indent=1))
        return
    click.echo(info["url"])
    if with_key:
        click.echo(key)


def _listed(found: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the pools of servers; pool managers of former releases have none."""
    listed, silent = listed_pools(found)
    return [pool for pool in listed if pool.get("server")], silent


def _chosen(found: dict[str, Any], server: str) -> dict[str, Any]:
    """Return the pool of the server with a name, or with an identity that begins so."""
    listed, _ = _listed(found)
    matches = [pool for pool in listed if pool["server"] == server]
    matches = matches or [pool for pool in listed if pool["identity"].startswith(server)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        each = ", ".join(pool["identity"] for pool in matches)
        raise click.ClickException(
            f"there are {len(matches)} servers {server!r}: {each}. Give the beginning of one's "
            "identity"
        )
    names = ", ".join(sorted({pool["server"] for pool in listed})) or "none"
    raise click.ClickException(
        f"no server {server!r} runs; these do: {names}. A server is started by the first run that "
        "uses it, and stops after its idle time"
    )


def _workers(pool: dict[str, Any]) -> list[str]:
    return [worker["name"] for worker in pool["workers"]]


def _live_workers(found: dict[str, Any], identity: str) -> list[str]:
    pools = [pool for pool in _listed(found)[0] if pool["identity"] == identity]
    return [w["name"] for pool in pools for w in pool["workers"] if w["state"] != "dead"]


def _status(worker: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = worker.get("server", {})
    return found


def _state(worker: dict[str, Any]) -> str:
    return str(_status(worker).get("state", worker["state"]))


def _replica(pool: dict[str, Any], worker: str) -> str:
    """Return the part of a worker's name that differs between replicas."""
    return worker.removeprefix(f"{pool['identity']}-").partition(".")[0]


class _LogReader:
    """Reads the log of one replica.

    Attributes:
        has_ended: Whether the worker is gone.
    """

    def __init__(self, worker: str) -> None:
        self._worker, self._position, self.has_ended = worker, 0, False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, offset: int | None = None) -> str:
        """Return what was written since, or from an offset on, which is from the end below 0."""
        start = self._position if offset is None else offset
        answer = ask_worker(self._worker, "read_log", start, _PART_BYTES)
        if answer is None:
            self.has_ended = True
            return ""
        self._position = answer[1]
        return self._decoder.decode(answer[0])


HEADER = (
    "NAME", "KIND", "IDENTITY", "REPLICA", "STATE", "URL", "NODE", "RESERVES", "UPTIME",
    "RESTARTS", "LEASES", "IDLE",
)  # fmt: skip


def rows(pool: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the replicas of a server as rows of the table."""
    leases = ", ".join(run[:8] for run in pool["leases"]) or "-"
    idle = "-" if pool["leases"] else duration(pool["idle_seconds"])
    kind = _kind(pool)
    return [
        (
            pool["server"],
            kind,
            pool["identity"],
            _replica(pool, worker["name"]),
            _state(worker),
            _status(worker).get("url") or "-",
            worker.get("node", "-"),
            _reserved(pool["bundle"], _status(worker).get("gpus", [])),
            _or_dash(_status(worker).get("uptime_seconds"), duration),
            _or_dash(_status(worker).get("restarts"), str),
            leases,
            idle,
        )
        for worker in pool["workers"]
    ]


def _kind(pool: dict[str, Any]) -> str:
    return str(pool["label"]).removesuffix(pool["server"]).strip() or "server"


def _reserved(bundle: dict[str, float], gpus: list[str]) -> str:
    """Return what a replica reserves, with the numbers of its GPUs on its node."""
    shown = [
        f"{amount / 2**30:.3g} GiB" if name == "memory" else f"{amount:g} {name}"
        for name, amount in bundle.items()
    ]
    shown += [f"(GPU {', '.join(gpus)})"] if gpus else []
    return " ".join(shown) or "-"


def _or_dash(value: Any, text: Any) -> str:
    return "-" if value is None else str(text(value))
