"""Runs over a server of a pipeline whose processes are killed at random times.

A round is a run of two stages, an asynchronous `prompt` and a synchronous `map`, over a server of
its own; it is run again if its driver was killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd
from support.arguments import grouped
from support.misbehaving_server import requests as noted_requests
from support.paths import SUPPORT, TESTS

ROWS = 300
KINDS = (
    "server", "child", "guard", "replica's worker", "client worker", "driver",
    "pool manager",
)  # fmt: skip
_PAUSE_SECONDS = (0.3, 2.0)
_MAX_ROUND_SECONDS = 180.0


def ask(text: str, llm: Any) -> str:
    """Answer one row by an HTTP request of its own."""
    body = {"model": llm.model, "messages": [{"role": "user", "content": text}]}
    headers = {"Content-Type": "application/json", **llm.headers}
    url = f"{llm.url}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def declared(folder: Path, replicas: int) -> vd.Pipeline:
    """The pipeline of a round, with a server that notes its requests in the round's folder."""
    llm = vd.Server(
        [
            "{python}", SUPPORT / "misbehaving_server.py", "--host", "{host}",
            "--port", "{port}", "--key-env", "SERVER_KEY", "--requests", str(folder / "requests"),
            "--children", str(folder / "children"), "--leak-children", "0", "--seconds", "0.03",
        ],
        model="echo", api_key_env="SERVER_KEY", replicas=replicas, version="1",
    )  # fmt: skip
    pipeline = vd.Pipeline("killed", source=vd.parquet(str(folder / "src" / "*.parquet")), id="id")
    shared: dict[str, Any] = {"on_error": "quarantine", "include_columns": ["text"]}
    pipeline.prompt(
        "answered",
        "{text}",
        batch_size=8,
        concurrency=vd.Workers(max_concurrency=2),
        model=llm,
        **grouped(shared),
    )
    pipeline.map(
        "asked",
        ask,
        fn_kwargs={"llm": llm},
        concurrency=2,
        columns={"text": "text"},
        **grouped(shared),
    )
    return pipeline


def run(folder: Path, replicas: int, compute: str) -> None:
    """Materialize the pipeline of a round, as the process that is called the driver."""
    chosen = vd.LocalCompute() if compute == "local" else vd.RayCompute(cluster=_cluster())
    done = dg.materialize(
        [declared(folder, replicas).build_assets()],
        resources={"compute": chosen, "store": vd.FragmentStore(root=str(folder / "store"))},
        raise_on_error=False,
    )
    sys.exit(not done.success)


def _cluster() -> vd.LocalCluster:
    return vd.LocalCluster(num_cpus=2, idle_minutes=5)


@dataclass
class Processes:
    """The processes of a round, found by what they are."""

    folder: Path
    driver: subprocess.Popen[bytes]
    compute: str

    def of(self, kind: str) -> list[psutil.Process]:
        """Return the living processes of a kind."""
        servers = self.servers()
        parents = [found for each in servers if (found := each.parent())]
        guards = [each for each in parents if "servers/guard.py" in " ".join(_words(each))]
        workers = {int(words[4]) for each in guards if (words := _words(each))}
        replicas = [psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)]
        found = {
            "server": servers,
            "child": [child for each in servers for child in each.children(recursive=True)],
            "guard": guards,
            "replica's worker": replicas,
            "driver": [psutil.Process(self.driver.pid)] if self.driver.poll() is None else [],
            "pool manager": self._ray("ray::PoolManager"),
            "client worker": [each for each in self._workers() if each not in replicas],
        }
        return found[kind]

    def servers(self) -> list[psutil.Process]:
        """Return the server's own processes."""
        noted = str(self.folder / "requests")
        return [
            each
            for each in psutil.process_iter()
            if noted in (words := _words(each)) and "misbehaving_server.py" in " ".join(words)
            and "local_guard" not in " ".join(words) and "guard.py" not in " ".join(words)
        ]  # fmt: skip

    def _workers(self) -> list[psutil.Process]:
        if self.compute == "ray":
            return self._ray("ray::HostActor")
        return [
            each
            for each in psutil.Process(self.driver.pid).children()
            if "local_worker" in " ".join(_words(each))
        ]

    def _ray(self, name: str) -> list[psutil.Process]:
        home = os.environ["VANE_DAGSTER_HOME"]
        found = []
        for each in psutil.process_iter():
            if _words(each)[:1] and _words(each)[0].startswith(name):
                environment = _environment(each)
                if environment.get("VANE_DAGSTER_HOME") == home:
                    found.append(each)
        return found


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


@dataclass
class Round:
    """What came of a round.

    Attributes:
        killed: What was killed, in order.
        lost: Rows without a result, of both stages.
        twice: Rows with two results.
        wrong: Rows with another row's answer.
        quarantined: Rows in quarantine.
        repeated: Requests beyond one for each row of each stage.
        left: Processes of the server after its cluster or driver is gone.
        ports: Ports of the server that still accept connections.
        runs: Runs that it took.
        seconds: Time until all rows were there.
        failures: Ends of runs other than by a kill.
    """

    killed: list[str] = field(default_factory=list)
    lost: int = 0
    twice: int = 0
    wrong: int = 0
    quarantined: int = 0
    repeated: int = 0
    left: int = 0
    ports: int = 0
    runs: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def campaign_round(
    chance: random.Random, kills: int, compute: str, kinds: tuple[str, ...] = KINDS
) -> Round:
    """Run a round, and kill processes while it runs.

    Args:
        chance: Decides what is killed, and when.
        kills: The most kills.
        compute: "ray" or "local".
        kinds: What may be killed.
    """
    folder = Path(tempfile.mkdtemp(prefix="vk-", dir="/tmp"))
    result, ports = Round(), set[int]()
    began = time.monotonic()
    try:
        (folder / "src").mkdir()
        table = {"id": range(ROWS), "text": [f"row {number}" for number in range(ROWS)]}
        pq.write_table(pa.table(table), folder / "src" / "a.parquet")
        replicas = chance.choice([1, 2])
        while result.runs < 6 and time.monotonic() - began < _MAX_ROUND_SECONDS:
            if _run_once(folder, replicas, compute, chance, kills, kinds, result, ports):
                break
        result.seconds = time.monotonic() - began
        _check_rows(folder, replicas, result)
        _end_server(compute)
        gone = time.monotonic() + 40
        found = Processes(folder, _ended(), compute)
        while found.servers() and time.monotonic() < gone:
            time.sleep(0.2)
        result.left = len(found.servers())
        result.ports = sum(_accepts(port) for port in ports)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _run_once(
    folder: Path,
    replicas: int,
    compute: str,
    chance: random.Random,
    kills: int,
    kinds: tuple[str, ...],
    result: Round,
    ports: set[int],
) -> bool:
    """Run the pipeline once; return whether it succeeded."""
    result.runs += 1
    log = folder / f"log-{result.runs}"
    command = [sys.executable, "-m", "support.server_kills", "--run", str(folder),
               "--replicas", str(replicas), "--compute", compute]  # fmt: skip
    with log.open("wb") as output:
        driver = subprocess.Popen(command, cwd=TESTS, stdout=output, stderr=output)
    processes = Processes(folder, driver, compute)
    was_killed = False
    while driver.poll() is None:
        try:
            driver.wait(chance.uniform(*_PAUSE_SECONDS))
        except subprocess.TimeoutExpired:
            ports |= _ports(processes)
            if len(result.killed) < kills and (folder / "requests").exists():
                kind = chance.choice(kinds)
                if victims := processes.of(kind):
                    victim = chance.choice(victims)
                    was_killed |= kind == "driver"
                    result.killed.append(kind)
                    try:
                        victim.send_signal(signal.SIGKILL)
                    except psutil.Error:
                        result.killed.pop()
    if driver.returncode and not was_killed:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line or "stage '" in line]
        result.failures.append((errors or lines or ["no output"])[-1][-300:])
    return driver.returncode == 0


def _check_rows(folder: Path, replicas: int, result: Round) -> None:
    pipeline = declared(folder, replicas)
    store = vd.FragmentStore(root=str(folder / "store"))
    for stage, column in (("answered", "answered"), ("asked", "asked")):
        try:
            rows = vd.load(pipeline[stage], store=store).to_pylist()
            quarantined = vd.quarantine(pipeline[stage], store=store).num_rows
        except vd.VaneError as error:
            result.failures.append(str(error)[:300])
            result.lost += ROWS
            continue
        counts = Counter(row["id"] for row in rows)
        result.lost += ROWS - len(counts)
        result.twice += sum(count > 1 for count in counts.values())
        result.wrong += sum(row[column] != f"echo: row {row['id']}" for row in rows)
        result.quarantined += quarantined
    result.repeated += len(noted_requests(folder / "requests")) - 2 * ROWS


def _end_server(compute: str) -> None:
    """End the round's server; that of a run without a cluster ends with it."""
    if compute == "ray":
        command = [
            sys.executable,
            "-m",
            "vane_dagster.cli.main",
            "pools",
            "evict",
            "echo",
            "--force",
        ]
        subprocess.run(command, check=False, capture_output=True)


def _ports(processes: Processes) -> set[int]:
    found = set()
    for server in processes.servers():
        try:
            for one in server.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.add(one.laddr.port)
        except psutil.Error:
            continue
    return found


def _accepts(port: int) -> bool:
    with socket.socket() as tried:
        tried.settimeout(1)
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _ended() -> subprocess.Popen[bytes]:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--run", type=Path)
    arguments.add_argument("--replicas", type=int)
    arguments.add_argument("--compute")
    given = arguments.parse_args()
    run(given.run, given.replicas, given.compute)
