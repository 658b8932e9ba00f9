"""Servers used outside of runs: `vd.serve`."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support.paths import SUPPORT
from vane_dagster.engine.worker_group import WorkerGroup

APP = SUPPORT / "misbehaving_server.py"


def server(requests: Path | None = None, **options: Any) -> vd.Server:
    noted = [] if requests is None else ["--requests", str(requests)]
    command = [sys.executable, APP, "--host", "{host}", "--port", "{port}", *noted]
    return vd.Server(command, model="echo", **options)


def answered(url: str, text: str) -> dict[str, Any]:
    body = {"model": "echo", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        found: dict[str, Any] = json.load(response)
    return found


def ask(url: str, text: str) -> str:
    answer: str = answered(url, text)["choices"][0]["message"]["content"]
    return answer


def test_a_block_has_a_ready_server(compute):
    llm = server(name="block")
    with vd.serve(llm, compute) as served:
        assert ask(served.url, "hi") == "echo: hi"
        assert served.model == "echo"
        with served.request() as endpoint:
            assert endpoint.url == served.url
        url = served.url
    with pytest.raises(vd.StageError, match=r"elsewhere, use `with vd\.serve\(server\)"):
        served.url  # noqa: B018  # looking it up raises
    if isinstance(compute, vd.LocalCompute):
        with pytest.raises(OSError, match="refused"):
            ask(url, "hi")
    else:
        assert ask(url, "hi") == "echo: hi", "it stays warm"


def test_a_server_may_be_used_in_several_blocks_at_once(local):
    llm = server(name="nested")
    with vd.serve(llm, local) as outer:
        with vd.serve(llm, local) as inner:
            assert ask(inner.url, "a") == "echo: a"
        assert ask(outer.url, "b") == "echo: b"
        with pytest.raises(ValueError, match="of the block"), vd.serve(llm, local):
            raise ValueError("of the block")
        assert ask(outer.url, "c") == "echo: c"


def test_a_block_waits_for_a_server_that_is_being_restarted(cluster):
    llm, ray_compute = server(name="restarting"), vd.RayCompute(cluster=cluster)
    with vd.serve(llm, ray_compute) as served:
        os.kill(int(answered(served.url, "who")["system_fingerprint"]), signal.SIGKILL)
        with vd.serve(llm, ray_compute) as again:
            assert ask(again.url, "a") == "echo: a"


def test_any_error_of_a_server_that_is_followed_is_raised(local, monkeypatch):
    def fail(group: WorkerGroup) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(WorkerGroup, "check_starts", fail)
    with pytest.raises(RuntimeError, match="planted"), vd.serve(server(name="lost"), local):
        pass


ENDS_SLOWLY = """
import http.server, pathlib, signal, sys, threading, time

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


def test_a_server_of_local_compute_finishes_before_the_block_returns(local, tmp_path: Path):
    ended = tmp_path / "ended"
    slow = vd.Server([sys.executable, "-c", ENDS_SLOWLY, "{port}", str(ended)], name="slow")
    with vd.serve(slow, local):
        assert not ended.exists()
    assert ended.read_text() == "ended"


def test_a_server_that_does_not_start_raises_with_its_log(local):
    broken = vd.Server([sys.executable, "-c", "raise SystemExit('no model')", "{port}"])
    with pytest.raises(vd.ModelLoadError, match="no model"), vd.serve(broken, local):
        pass


def test_what_is_no_server_is_refused():
    with pytest.raises(vd.DefinitionError, match=r"expected a server, as vd\.VLLMServer"):
        vd.serve("llm").__enter__()
    with pytest.raises(vd.DefinitionError, match=r"compute is 'local'; expected one, as vd\.Ray"):
        vd.serve(server(name="a"), "local").__enter__()


def test_a_local_file_needs_a_store(tmp_path: Path, local):
    (tmp_path / "weights").write_text("1")
    sent = vd.Server(["serve", "{port}", vd.local_file(tmp_path / "weights")])
    with pytest.raises(vd.DefinitionError, match="sent by way of a store"), vd.serve(sent, local):
        pass
