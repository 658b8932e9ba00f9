"""A server on Ray: its key is never shown; its address and log are those of its node."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import ray

import vane_dagster as vd
from support.pool_models import listed, ray_compute  # noqa: F401  # fixtures
from support.server_runs import echo, prompting
from vane_dagster.compute.client import ask_worker


def test_the_key_is_in_no_log_event_record_file_or_command_line(
    tmp_path, ray_compute, materialize, capfd, caplog
):
    server = echo("secret", f"--requests={tmp_path}/requests", "--access-log", version="1")
    texts = ["a", "b refused", "c poison-once", "d"]
    result = materialize(prompting(tmp_path / "src", server, texts), ray_compute)
    pools = listed()
    (pool,) = [p for p in pools if p["server"] and p["leases"] == [] and "secret" in p["label"]]
    key = ask_worker(pool["workers"][0]["name"], "server_endpoint")["api_key"]
    assert len(key) > 20
    out, err = capfd.readouterr()
    aside = vd.quarantine("prompting/answers", store=str(tmp_path / "store"))
    assert aside["id"].to_pylist() == [1]
    shown = [out, err, caplog.text, json.dumps(pools, default=str), str(aside.to_pylist())]
    shown += [str(event) for event in result.all_events]
    for process in psutil.process_iter(["cmdline"]):
        shown.append(" ".join(process.info["cmdline"] or []))
    assert not [text for text in shown if key in text]
    session = Path(ray._private.worker._global_node.get_session_dir_path()).resolve()
    log = Path(pool["workers"][0]["server"]["log_path"])
    logs = log.parent.resolve()
    assert (logs, "secret" in log.name) == (session / "logs", True)
    url = pool["workers"][0]["server"]["url"]
    assert url.startswith(f"http://{ray.util.get_node_ip_address()}:")
    files = [file for root in (tmp_path, logs) for file in root.rglob("*") if file.is_file()]
    assert not [file for file in files if key.encode() in file.read_bytes()]
