"""What another user of the machine can do: nothing. The attacks are made as user `nobody`."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support.attacks import NOBODY, as_root, shared_tmp  # noqa: F401  # fixtures
from support.data import write_source
from support.results import Run, failure
from vane_dagster._private_folder import MARK
from vane_dagster.compute.local_head import LocalHead
from vane_dagster.compute.processes import marked
from vane_dagster.fingerprint.bundle import pack
from vane_dagster.fingerprint.code import code_identity


def as_nobody(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    ids: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    command = ["/bin/sh", "-c", script]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, **ids, **options)


USER_MODULE = "def f(rows):\n    return rows\n"
PLANTED_IMPORT = "import pathlib; pathlib.Path('{ran}').touch(); raise ImportError('planted')"


def plant_module(folder: Path, name: str) -> Path:
    """Has another user put a module into a folder; the file that it makes when it is imported."""
    ran = folder / "ran"
    code = PLANTED_IMPORT.format(ran=ran)
    assert as_nobody(f"cat > {folder}/{name}.py", input=code).returncode == 0
    return ran


@as_root
def test_local_workers_run_no_module_that_another_user_has_planted(
    shared_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, materialize: Run
) -> None:
    write_source(tmp_path / "in", {"id": [1, 2], "x": [1, 2]})

    # In the current folder, which others can write to.
    ran = plant_module(shared_tmp, "pyarrow")
    monkeypatch.chdir(shared_tmp)
    pipe = vd.Pipeline("rows", source=vd.parquet(str(tmp_path / "in")), id="id")
    pipe.project("out", ["x"])
    assert materialize(pipe, vd.LocalCompute(num_cpus=1)).success
    assert not ran.exists()
    monkeypatch.chdir(tmp_path)

    # By a link in the place of the code folder, to a folder of root's that all can write to.
    (tmp_path / "own_rows.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_rows  # type: ignore[import-not-found]  # made by the test

    archive = pack(code_identity(own_rows.f).modules, own_rows.f).archive
    digest = hashlib.sha256(archive).hexdigest()
    evil = f"import os, pathlib; pathlib.Path('{ran}').write_text(str(os.getuid()))\n{USER_MODULE}"
    drop = shared_tmp / "drop"
    drop.mkdir()
    drop.chmod(0o777)
    for folder in shared_tmp.glob("vane-code-*"):
        shutil.rmtree(folder)
    planted = as_nobody(
        f"mkdir {drop}/{digest} && cat > {drop}/{digest}/own_rows.py"
        f" && ln -s {drop} {shared_tmp}/vane-code-0",
        input=evil,
    )
    assert planted.returncode == 0, planted.stderr
    pipe = vd.Pipeline("attacked", source=vd.parquet(str(tmp_path / "in")), id="id")
    pipe.map_batches("out", own_rows.f, schema={"x": "BIGINT"})
    result = materialize(pipe, vd.LocalCompute(num_cpus=1), raises=False)
    del sys.modules["own_rows"]
    assert not ran.exists(), f"another user's module ran as user {ran.read_text()}"
    assert "vane-code-0 is not private: it belongs to user 65534 with mode l" in failure(result)


@as_root
def test_another_user_cannot_use_a_running_head(
    shared_tmp: Path, tmp_path: Path, cluster: vd.LocalCluster
) -> None:
    cluster.connect(True)
    local = LocalHead(name="tests")
    head = local.ensure()

    # Nor read its token, its logs (which hold what users' code prints) or use its sockets.
    logs = Path(head.session_dir, "logs")
    assert list(logs.iterdir())
    sockets = list(Path(head.session_dir, "sockets").iterdir())
    assert sockets
    for path in (local.folder, local.temp_dir, logs, Path(head.token_path), *sockets):
        assert as_nobody(f"stat {path}").returncode != 0 or path in (local.folder, local.temp_dir)
        assert as_nobody(f"cat {path} || ls {path}").returncode != 0
        assert as_nobody(f"touch {path}/x").returncode != 0

    # Its workers do not import from a folder that others can write to.
    ran = plant_module(shared_tmp, "planted")
    (tmp_path / "beside_the_script.py").write_text("")
    script = tmp_path / "driver.py"
    script.write_text(
        "from vane_dagster.compute.local_head import LocalHead, connect\n"
        "connect(LocalHead(name='tests').ensure())\n"
        "import importlib.util as i, ray\n"
        "def found(): return [n for n in ('planted', 'beside_the_script') if i.find_spec(n)]\n"
        "print(ray.get(ray.remote(num_cpus=0)(found).remote()))\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, cwd=shared_tmp, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "['beside_the_script']\n", done.stderr
    assert not ran.exists()

    # Processes of another user would be ended with it, or be recorded as its servers.
    environment = {**os.environ, MARK: str(tmp_path)}
    ids: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    both = [subprocess.Popen(["/bin/sleep", "60"], env=environment, cwd="/", **ids)]
    both.append(subprocess.Popen(["/bin/sleep", "60"], env=environment))
    try:
        deadline = time.monotonic() + 20
        while both[1].pid not in (known := marked(str(tmp_path))) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(known) == {both[1].pid}
    finally:
        for process in both:
            process.kill()
            process.wait()


# One method of each service that could run code or tell of a job; an empty message is valid.
METHODS = {
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.ActorInfoGcsService/RegisterActor",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.ObjectManagerService/Pull",
}


def test_no_port_of_a_head_answers_without_the_token(cluster: vd.LocalCluster) -> None:
    import grpc
    import psutil

    from vane_dagster.compute import processes

    cluster.connect(True)
    local = LocalHead(name="tests")
    import ray

    holder = ray.remote(num_cpus=0)(type("Holder", (), {"ping": lambda self: None})).remote()
    ray.get(holder.ping.remote())
    ports = {
        connection.laddr.port
        for pid in processes.marked(str(local.temp_dir))
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    answers: dict[str, set[str]] = {method: set() for method in METHODS}
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method in METHODS:
                call = channel.unary_unary(method, None, None)
                try:
                    call(b"", timeout=10)
                    answers[method].add("OK")
                except grpc.RpcError as error:
                    answers[method].add(error.code().name)
        for path in ("/get_or_create_runtime_env", "/api/job_agent/jobs/"):
            assert http_status(port, path) in (None, 401, 403, 404, 405), f"{path} at port {port}"
    for method, found in answers.items():
        assert "UNAUTHENTICATED" in found, f"{method}: {found}"
        assert found <= {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE"}, f"{method}: {found}"
    del holder


def http_status(port: int, path: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, b"")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
