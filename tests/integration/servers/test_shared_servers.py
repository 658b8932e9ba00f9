"""Servers in runs: shared by stages, pipelines and runs; their keys are never shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import ray

import vane_dagster as vd
from support.data import read_stage
from support.pool_models import listed, ray_compute, until  # noqa: F401  # fixtures
from support.results import metadata
from support.server_runs import asking, echo, prompting
from vane_dagster.compute.client import ask_worker


def starts(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def servers(folder: Path, pipeline: str = "asking") -> set[str]:
    return set(read_stage(folder / "store", pipeline, "answers")["server"].to_pylist())


def test_stages_pipelines_and_runs_on_a_cluster_share_a_server_and_its_key_is_not_shown(
    tmp_path, ray_compute, materialize, capfd, caplog
):
    file = tmp_path / "starts"
    options = (f"--requests={tmp_path}/requests", "--access-log", f"--starts={file}")
    llm = echo("shared", *options, version="1", idle_minutes=0.2)
    texts = ["a", "b refused", "c poison-once", "d"]
    results = [
        materialize(prompting(tmp_path / "texts", llm, texts), ray_compute),
        materialize(asking(tmp_path / "src", llm), ray_compute),
    ]
    assert servers(tmp_path) == {str(starts(file)[-1])}
    assert len(starts(file)) == 2, "the second after a row had ended it"
    first, second = (metadata(result, "answers") for result in results)
    assert (first["server_starts"], first["server_restarts"]) == (1, 1)
    assert (second["server_warm_hits"], second.get("server_starts", 0)) == (1, 0)
    assert "| shared | http://" in second["details"]
    aside = vd.quarantine("prompting/answers", store=str(tmp_path / "store"))
    assert aside["id"].to_pylist() == [1]

    # The key is in no log, event, record, file or command line.
    pools = listed()
    (worker,) = next(pool["workers"] for pool in pools if "shared" in pool["label"])
    key = ask_worker(worker["name"], "server_endpoint")["api_key"]
    assert len(key) > 20
    out, err = capfd.readouterr()
    shown = [out, err, caplog.text, json.dumps(pools, default=str), str(aside.to_pylist())]
    shown += [str(event) for result in results for event in result.all_events]
    for process in psutil.process_iter(["cmdline"]):
        shown.append(" ".join(process.info["cmdline"] or []))
    assert not [text for text in shown if key in text]
    session = Path(ray._private.worker._global_node.get_session_dir_path()).resolve()
    log = Path(worker["server"]["log_path"])
    assert (log.parent.resolve(), "shared" in log.name) == (session / "logs", True)
    assert worker["server"]["url"].startswith(f"http://{ray.util.get_node_ip_address()}:")
    files = [path for root in (tmp_path, session / "logs") for path in root.rglob("*")]
    assert not [path for path in files if path.is_file() and key.encode() in path.read_bytes()]
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


def test_servers_of_a_local_run_are_shared_by_its_stages_and_finish_before_it_ends(
    tmp_path, local, materialize
):
    """One has two replicas on the node."""
    ended, file = tmp_path / "ended", tmp_path / "starts"
    slow = vd.Server(
        [sys.executable, "-c", ENDS_SLOWLY, "{port}", str(ended)], name="slow", version="1"
    )
    llm = echo("two", "--starts", str(file), version="1", per_node=2)
    pipeline = asking(tmp_path / "src", llm)
    pipeline.prompt("said", "{id}", model=llm)
    pipeline.map("url", served, fn_kwargs={"llm": slow})
    assert materialize(pipeline, local).success
    assert ended.read_text() == "ended"
    assert len(starts(file)) == 2
    assert servers(tmp_path) <= {str(pid) for pid in starts(file)}
    assert not [pid for pid in starts(file) if psutil.pid_exists(pid)]
