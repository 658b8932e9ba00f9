"""Servers between stages, pipelines and runs: shared, told apart, evicted, and left idle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil

import vane_dagster as vd
from support.data import read_stage
from support.pool_models import until
from support.server_runs import asking, echo


def starts(file: Path) -> list[int]:
    """The process ids of a server's starts."""
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def servers(folder: Path, pipeline: str = "asking") -> set[str]:
    """The servers that answered a stage's rows, by their process ids."""
    return set(read_stage(folder / "store", pipeline, "answers")["server"].to_pylist())


def counted(tmp_path: Path, name: str, *flags: str, **options: Any) -> tuple[vd.Server, Path]:
    """A server that notes its starts in a file."""
    file = tmp_path / f"starts-{name}"
    return echo(name, "--starts", str(file), *flags, version="1", **options), file


def test_stages_and_pipelines_share_a_server(tmp_path, compute, materialize):
    llm, file = counted(tmp_path, "shared", idle_minutes=0.2)
    first = asking(tmp_path / "src", llm)
    first.prompt("said", "{id}", model=llm)
    assert materialize(first, compute).success
    is_warm = isinstance(compute, vd.RayCompute)
    second = asking(tmp_path / "src", llm, name="other")
    assert materialize(second, compute).success
    assert len(starts(file)) == (1 if is_warm else 2)
    assert len(servers(tmp_path)) == 1
    assert (servers(tmp_path) == servers(tmp_path, "other")) is is_warm
    until(lambda: not psutil.pid_exists(starts(file)[-1]), "it ends when it is idle")


ENDS_SLOWLY = """
import http.server, pathlib, signal, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

def end(*_):
    time.sleep(0.5)
    pathlib.Path(sys.argv[2]).write_text("ended")
    sys.exit()

signal.signal(signal.SIGTERM, end)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def served(id: int, llm: Any) -> str:
    return str(llm.url)


def test_a_server_of_local_compute_finishes_before_the_run_ends(tmp_path, local, materialize):
    ended = tmp_path / "ended"
    slow = vd.Server(
        [sys.executable, "-c", ENDS_SLOWLY, "{port}", str(ended)], name="slow", version="1"
    )
    pipeline = vd.Pipeline("served", source=vd.table({"id": [1]}), id="id")
    pipeline.map("url", served, fn_kwargs={"llm": slow})
    assert materialize(pipeline, local).success
    assert ended.read_text() == "ended"


def test_replicas_of_a_node(tmp_path, local, materialize):
    llm, file = counted(tmp_path, "two", per_node=2)
    assert materialize(asking(tmp_path / "src", llm), local).success
    assert len(starts(file)) == 2
