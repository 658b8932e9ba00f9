"""``vane-dagster pools`` with servers on a real Ray cluster."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
from click.testing import CliRunner, Result

import vane_dagster as vd
from support.pool_models import ray_compute, until  # noqa: F401  # fixtures
from support.server_runs import echo
from vane_dagster.cli.main import main
from vane_dagster.compute.api import Lease
from vane_dagster.compute.ray_backend import RayBackend
from vane_dagster.engine.server_pools import server_pool
from vane_dagster.storage.filesystem import StoragePath


def command(*arguments: str) -> Result:
    name = ["--name", "tests"]
    if not arguments or arguments[0].startswith("-"):
        return CliRunner().invoke(main, ["pools", *name, *arguments])
    return CliRunner().invoke(main, ["pools", arguments[0], *arguments[1:], *name])


def pools() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(command("--json").stdout)
    return found


def listed() -> dict[str, Any]:
    return {pool["server"]: pool for pool in pools()}


def replicas(name: str) -> list[dict[str, Any]]:
    pool = listed().get(name, {"workers": []})
    return [{**each, **each.get("server", {})} for each in pool["workers"]]


@contextlib.contextmanager
def leased(run: str, *servers: vd.Server) -> Iterator[Lease]:
    """Lease servers as a run does, and start them, without waiting for them."""
    backend = RayBackend()
    pools = [server_pool(server, backend.capacity(), StoragePath("/none")) for server in servers]
    lease = backend.lease(run, pools)
    try:
        for worker in lease.workers():
            if worker.pool != "io":
                lease.load(worker, {})
        yield lease
    finally:
        lease.release()


def is_ready(name: str) -> bool:
    found = replicas(name)
    return bool(found) and all(replica["state"] == "ready" for replica in found)


def test_servers_are_listed_used_watched_and_stopped(ray_compute):
    # One is ready: it is listed, with its address and key on request, and not stopped in use.
    with leased("run-of-mine", echo("llm", replicas=vd.Workers(num_cpus=0.5))):
        until(lambda: is_ready("llm"), "the server is ready", 60)
        shown = command()
        assert shown.exit_code == 0
        header, *lines = shown.stdout.splitlines()
        (line,) = [line for line in lines if line.startswith("server llm ")]
        assert header.split()[:3] == ["POOL", "STAGES", "IDENTITY"]
        found = listed()["llm"]
        (replica,) = replicas("llm")
        for cell in (found["identity"], "ready",
                     replica["url"], replica["node"], "run-of-m"):  # fmt: skip
            assert cell in line
        assert (found["leases"], replica["restarts"]) == (["run-of-mine"], 0)

        url, key = command("endpoint", "llm", "--api-key").stdout.splitlines()
        assert command("endpoint", found["identity"][:6]).stdout == f"{url}\n"
        assert replica["url"] == url
        request = urllib.request.Request(f"{url}/v1/models")
        request.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert json.load(answer)["data"][0]["id"] == "echo"
        as_json = json.loads(command("endpoint", "llm", "--json").stdout)
        assert (as_json["url"], as_json["model"]) == (url, "echo")
        assert "api_key" not in as_json
        assert (
            json.loads(command("endpoint", "llm", "--json", "--api-key").stdout)["api_key"] == key
        )
        everything = command("--json").stdout
        assert url in everything
        assert key not in everything + shown.stdout

        refused = command("evict", "llm")
        assert refused.exit_code == 1
        assert f"llm ({found['identity']}) is leased by run-of-mine; --force" in refused.stderr
        os.kill(replica["pid"], 0)

    # Afterwards it can be.
    assert listed()["llm"]["leases"] == []
    assert command("evict", "llm").stdout == f"Ended server llm ({found['identity']}).\n"
    until(lambda: not psutil.pid_exists(replica["pid"]), "the server has ended", 30)
    gone = command("endpoint", "llm")
    assert gone.exit_code == 1
    assert "there is no pool 'llm'" in gone.stderr

    # Another one takes long to start: its log says where it is, and it is stopped by force.
    server = echo("slow", "--warm-up-seconds", "600", "--access-log", replicas=2)
    with leased("run", server):
        asked = "GET /health"
        until(lambda: command("logs", "slow").stdout.count(asked) > 1, "it is asked", 60)
        shown = command("logs", "slow", "--lines", "1").stdout.splitlines()
        headings = [f"==> {replica['name']} <==" for replica in replicas("slow")]
        assert (shown[::2], len(shown)) == (headings, 4)
        none = command("endpoint", "slow")
        assert none.exit_code == 1
        assert "has no ready replica: it is starting" in none.stderr
        assert command("evict", "slow", "--force").exit_code == 0
