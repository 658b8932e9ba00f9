"""``vane-dagster servers`` with servers on a real Ray cluster."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

import vane_dagster as vd
from support.pool_models import ray_compute, until  # noqa: F401  # fixtures
from support.server_runs import echo
from vane_dagster.cli.main import main
from vane_dagster.compute.api import Lease
from vane_dagster.compute.ray_backend import RayBackend
from vane_dagster.engine.server_pools import server_pool
from vane_dagster.storage.filesystem import Location


def command(*arguments: str) -> Result:
    name = ["--name", "tests"]
    if not arguments or arguments[0].startswith("-"):
        return CliRunner().invoke(main, ["servers", *name, *arguments])
    return CliRunner().invoke(main, ["servers", arguments[0], *arguments[1:], *name])


def listed() -> dict[str, Any]:
    found = json.loads(command("--json").stdout)
    return {pool["server"]: pool for pool in found}


def replicas(name: str) -> list[dict[str, Any]]:
    """What is known of the replicas of a server."""
    pool = listed().get(name, {"workers": []})
    return [{**each, **each.get("server", {})} for each in pool["workers"]]


@contextlib.contextmanager
def leased(run: str, *servers: vd.Server) -> Iterator[Lease]:
    """Lease servers as a run does, and start them, without waiting for them."""
    backend = RayBackend()
    pools = [server_pool(server, backend.capacity(), Location("/none")) for server in servers]
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


def test_a_server_is_listed_used_and_stopped(ray_compute):
    with leased("run-of-mine", echo("llm", replicas=vd.Workers(num_cpus=0.5))):
        until(lambda: is_ready("llm"), "the server is ready", 60)
        shown = command()
        assert shown.exit_code == 0
        header, line = shown.stdout.splitlines()
        assert header.split()[:5] == ["NAME", "KIND", "IDENTITY", "REPLICA", "STATE"]
        found = listed()["llm"]
        (replica,) = replicas("llm")
        for cell in ("llm   server ", found["identity"], "ready", "0.5 CPU",
                     replica["url"], replica["node"], "run-of-m"):  # fmt: skip
            assert cell in line
        assert (found["leases"], replica["restarts"]) == (["run-of-mine"], 0)
        assert replica["uptime_seconds"] > 0

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
        everything = CliRunner().invoke(main, ["pools", "--name", "tests", "--json"]).stdout
        assert url in everything
        assert key not in everything + shown.stdout + command("--json").stdout

        refused = command("stop", "llm")
        assert refused.exit_code == 1
        assert f"llm ({found['identity']}) is leased by run-of-mine; --force" in refused.stderr
        os.kill(replica["pid"], 0)
    assert listed()["llm"]["leases"] == []
    assert command("stop", "llm").stdout == f"Stopped server llm ({found['identity']}).\n"
    with pytest.raises(ProcessLookupError):
        os.kill(replica["pid"], 0)
    assert command().stdout.startswith("No servers")
    gone = command("endpoint", "llm")
    assert gone.exit_code == 1
    assert "no server 'llm' runs; these do: none" in gone.stderr


def test_the_log_is_read_while_a_server_starts(ray_compute):
    server = echo("slow", "--warm-up-seconds", "600", "--access-log")
    with leased("run", server):
        shown = until(lambda: command("logs", "slow").stdout, "the log begins", 60)
        assert shown.startswith("the server starts on port ")
        assert replicas("slow")[0]["state"] == "starting"
        until(lambda: "GET /health" in command("logs", "slow").stdout, "it is asked", 30)
        assert len(command("logs", "slow", "--lines", "1").stdout.splitlines()) == 1
        none = command("endpoint", "slow")
        assert none.exit_code == 1
        assert "has no ready replica: starting" in none.stderr
        assert command("stop", "slow", "--force").exit_code == 0


def test_the_logs_of_replicas_are_followed_until_they_stop(ray_compute):
    server = echo("two", "--access-log", replicas=2)
    with leased("run", server):
        until(lambda: is_ready("two"), "both replicas are ready", 60)
        prefixes = {
            each["name"].split("-", 1)[1].partition(".")[0]: each for each in replicas("two")
        }
        arguments = ["servers", "logs", "two", "-f", "--lines", "0", "--name", "tests"]
        follower = subprocess.Popen(
            [sys.executable, "-m", "vane_dagster", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(follower.stdout or ()))
        reader.start()
        urls = {name: replica["url"] for name, replica in prefixes.items()}

        def followed() -> bool:
            for name, url in urls.items():
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/health?of={name}", timeout=5).close()
            time.sleep(0.5)
            return all(any(f"of={n}" in line for line in lines) for n in urls)

        until(followed, "lines of both replicas are printed", 60)
    assert command("stop", "two").exit_code == 0
    assert follower.wait(30) == 0
    reader.join()
    with follower:
        assert "server two" in follower.stderr.read()
    assert {line.split()[1] for line in lines if line.startswith("==> ")} == {*prefixes}


def test_a_log_is_followed_while_a_run_replaces_the_server(ray_compute):
    with leased("run", echo("again")) as lease:
        (worker,) = [worker for worker in lease.workers() if worker.pool != "io"]
        arguments = ["servers", "logs", "again", "-f", "--name", "tests"]
        follower = subprocess.Popen(
            [sys.executable, "-m", "vane_dagster", *arguments], stdout=subprocess.PIPE, text=True
        )
        assert follower.stdout is not None
        first = follower.stdout.readline()
        assert command("stop", "again", "--force").exit_code == 0
        lease.load(lease.replace(worker), {})
        assert follower.stdout.readline().startswith("==> ")
        second = follower.stdout.readline()
        assert first.startswith("the server starts on port ")
        assert second.startswith("the server starts on port ")
    assert command("stop", "again").exit_code == 0
    with follower:
        assert follower.wait(30) == 0


def test_servers_of_one_name_are_told_apart_by_identity(ray_compute):
    with leased("run", echo("same"), echo("same", "--seconds", "0.1")):
        found = json.loads(command("--json").stdout)
        both = [server["identity"] for server in found]
        unclear = command("endpoint", "same")
        assert unclear.exit_code == 1
        assert "there are 2 servers 'same'" in unclear.stderr
        assert all(identity in unclear.stderr for identity in both)
        assert command("stop", both[0][:8], "--force").exit_code == 0
        assert [each["identity"] for each in json.loads(command("--json").stdout)] == both[1:]


def test_without_a_cluster():
    for arguments in (["servers"], ["servers", "logs", "x"], ["servers", "endpoint", "x"]):
        done = CliRunner().invoke(main, [*arguments, "--name", "not-there"])
        assert done.exit_code == 1
        assert "The local cluster 'not-there' is not running" in done.stderr
