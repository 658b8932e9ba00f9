"""What another user of the machine can do: nothing. The attacks are made as user `nobody`."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support import forked
from support.attacks import (
    NOBODY,
    as_root,
    link_of_nobody,
    mode,
    of_nobody,
    shared_tmp,  # noqa: F401  # fixtures
    writable_by_all,
)
from support.data import write_source
from support.heads import HEAD, accepting
from support.results import Run, failure
from vane_dagster._private_folder import (
    MARK,
    is_safe_to_import_from,
)
from vane_dagster.compute.connection import connect_environment
from vane_dagster.compute.local_head import LocalHead
from vane_dagster.errors import ComputeError
from vane_dagster.fingerprint.bundle import CodeBundle, pack
from vane_dagster.fingerprint.code import code_identity


def as_nobody(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a shell script as another local user."""
    ids: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    command = ["/bin/sh", "-c", script]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, **ids, **options)


@as_root
def test_a_link_of_another_user_is_not_safe_to_import_from(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shared_tmp / "own"
    (own / "below").mkdir(parents=True, mode=0o755)
    assert is_safe_to_import_from(own)
    assert as_nobody(f"ln -s {own} {shared_tmp}/link").returncode == 0
    assert not is_safe_to_import_from(shared_tmp / "link")
    assert not is_safe_to_import_from(shared_tmp / "link" / "below" / ".." / "below")
    assert not is_safe_to_import_from(shared_tmp)
    monkeypatch.chdir(shared_tmp / "link")
    assert is_safe_to_import_from(".")  # the process is there, whatever becomes of the link


def test_the_heads_temporary_folder_follows_a_short_state_folder(tmp_path: Path) -> None:
    """It depends on nothing else, so that every process finds the same one."""
    local = LocalHead(home="/data/own")
    assert local.temp_dir == local.folder / "t"
    session = "session_2026-11-21_05-15-26_123456_1234567"
    assert len(f"{local.temp_dir}/r/{session}/sockets/plasma_store") <= 103
    deep = LocalHead(home=tmp_path / ("d" * 60))
    assert re.fullmatch(rf"/tmp/vane-{os.getuid()}-[0-9a-f]{{8}}", str(deep.temp_dir))


USER_MODULE = "def f(rows):\n    return rows\n"


@as_root
def test_a_planted_module_does_not_run_in_a_worker(
    shared_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, materialize: Run
) -> None:
    """The whole attack: a link at a predictable path, to a folder of root's that all can write."""
    (tmp_path / "own_rows.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_rows  # type: ignore[import-not-found]  # made by the test

    ran = shared_tmp / "ran"
    digest = bundle(own_rows.f).digest
    evil = f"import os, pathlib; pathlib.Path('{ran}').write_text(str(os.getuid()))\n{USER_MODULE}"
    drop = shared_tmp / "drop"
    drop.mkdir()
    drop.chmod(0o777)
    planted = as_nobody(
        f"mkdir {drop}/{digest} && cat > {drop}/{digest}/own_rows.py"
        f" && ln -s {drop} {shared_tmp}/vane-code-0",
        input=evil,
    )
    assert planted.returncode == 0, planted.stderr
    write_source(tmp_path / "in", {"id": [1, 2], "x": [1, 2]})
    pipe = vd.Pipeline("attacked", source=vd.parquet(str(tmp_path / "in")), id="id")
    pipe.map_batches("out", own_rows.f, schema={"x": "BIGINT"})
    result = materialize(pipe, vd.LocalCompute(num_cpus=1), raises=False)
    del sys.modules["own_rows"]
    assert not ran.exists(), f"another user's module ran as user {ran.read_text()}"
    assert "vane-code-0 is not private: it belongs to user 65534 with mode l" in failure(result)


def bundle(obj: Any) -> CodeBundle:
    return pack(code_identity(obj).modules, obj)


# The local Ray head.


@as_root
@pytest.mark.parametrize("plant", [writable_by_all, of_nobody, link_of_nobody])
def test_a_planted_record_is_not_a_head(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    """It would connect drivers to another user's head, whose objects they unpickle."""
    local = LocalHead(home=tmp_path)
    plant(local.folder)
    with accepting() as alive:
        (local.folder / "head.json").write_text(json.dumps(dataclasses.asdict(alive)))
        for use in (local.find, local.ensure, local.stop):
            with pytest.raises(ComputeError, match=r"is not private.* set VANE_DAGSTER_HOME to"):
                use()


def test_a_token_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("f" * 64)
    token.chmod(0o600)
    head = dataclasses.replace(HEAD, token_path=str(token))
    assert connect_environment(head)["RAY_AUTH_TOKEN_PATH"] == str(token)
    for bits in (0o640, 0o604, 0o620):
        token.chmod(bits)
        with pytest.raises(ComputeError, match=r"token is not private.*cluster stop"):
            connect_environment(head)


# What listens, and what lies around.


@as_root
def test_another_user_cannot_enter_a_running_head(cluster: vd.LocalCluster) -> None:
    """Nor read its token, its logs (which hold what users' code prints) or use its sockets."""
    cluster.connect(True)
    local = LocalHead(name="tests")
    head = local.ensure()
    logs = Path(head.session_dir, "logs")
    assert list(logs.iterdir())
    sockets = list(Path(head.session_dir, "sockets").iterdir())
    assert sockets
    for path in (local.folder, local.temp_dir, logs, Path(head.token_path), *sockets):
        assert as_nobody(f"stat {path}").returncode != 0 or path in (local.folder, local.temp_dir)
        assert as_nobody(f"cat {path} || ls {path}").returncode != 0
        assert as_nobody(f"touch {path}/x").returncode != 0


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
    """The HTTP status of a POST request; None from a port that does not speak HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, b"")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


@as_root
def test_another_user_cannot_read_tables_of_local_workers() -> None:
    from vane_dagster.compute.local_backend import LocalBackend

    backend = LocalBackend(num_cpus=1)
    try:
        table = Path(backend.folder, "a.arrow")
        table.write_text("rows")
        assert as_nobody(f"ls {backend.folder}").returncode != 0
        assert as_nobody(f"cat {table}").returncode != 0
    finally:
        backend.close()


@as_root
def test_a_plan_of_faults_cannot_be_replaced_by_another_user(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor preceded by a link in its place, to have the test write into a file of this user."""
    from vane_dagster.testing import CallFault, faults

    victim = shared_tmp / "victim"
    victim.write_text("untouched")
    chmod = Path.chmod

    def chmod_then_attack(path: Path, mode: int) -> None:
        chmod(path, mode)
        as_nobody(f"ln -s {victim} {path}/plan.json")

    monkeypatch.setattr(Path, "chmod", chmod_then_attack)
    (shared_tmp / "shared").mkdir(mode=0o755)
    with faults(CallFault("p/s", ids=[1]), folder=shared_tmp / "shared") as injected:
        assert injected.fired == (0,)
        (place,) = (shared_tmp / "shared").iterdir()
        assert as_nobody(f"touch {place}/fired-0-1").returncode == 0
        plan = next(file for file in place.iterdir() if file.name != "fired-0-1")
        assert as_nobody(f"mv {plan} {place}/gone").returncode != 0
        assert as_nobody(f"echo > {plan}").returncode != 0
    assert victim.read_text() == "untouched"


def test_duckdb_of_workers_and_of_readers_spills_into_a_private_folder(
    shared_tmp: Path, tmp_path: Path
) -> None:
    """Each in a folder of its own: DuckDB's files have the same names in all processes."""
    script = (
        "from vane_dagster.worker.database import connection\n"
        "print(connection().execute(\"SELECT current_setting('temp_directory')\").fetchone()[0])"
    )
    heads = (str(tmp_path / "h"), tmp_path / "h" / "spill")
    for head, expected in (("", shared_tmp / f"vane-spill-{os.geteuid()}"), heads):
        environment = {**os.environ, MARK: head}
        done = forked.run(["-c", script], environment, tmp_path, 60, forked.WORKER)
        assert Path(done.stdout.strip()).parent == expected, done.stderr
        assert mode(expected) == 0o700


# Whose code runs.

PLANTED_IMPORT = "import pathlib; pathlib.Path('{ran}').touch(); raise ImportError('planted')"


@as_root
def test_local_workers_do_not_import_from_a_folder_that_others_can_write_to(
    shared_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, materialize: Run
) -> None:
    ran = plant_module(shared_tmp, "pyarrow")
    monkeypatch.chdir(shared_tmp)
    write_source(tmp_path / "in", {"id": [1, 2], "x": [1, 2]})
    pipe = vd.Pipeline("rows", source=vd.parquet(str(tmp_path / "in")), id="id")
    pipe.project("out", ["x"])
    assert materialize(pipe, vd.LocalCompute(num_cpus=1)).success
    assert not ran.exists()


@as_root
def test_ray_workers_do_not_import_from_a_folder_that_others_can_write_to(
    shared_tmp: Path, tmp_path: Path, cluster: vd.LocalCluster
) -> None:
    cluster.connect(True)
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


def plant_module(folder: Path, name: str) -> Path:
    """Has another user put a module into a folder; the file that it makes when it is imported."""
    ran = folder / "ran"
    code = PLANTED_IMPORT.format(ran=ran)
    assert as_nobody(f"cat > {folder}/{name}.py", input=code).returncode == 0
    return ran


@as_root
def test_processes_of_another_user_are_not_taken_for_the_heads(tmp_path: Path) -> None:
    """They would be ended with it, or be recorded as its servers."""
    from vane_dagster.compute.processes import marked

    environment = {**os.environ, MARK: str(tmp_path)}
    ids: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    both = [subprocess.Popen(["/bin/sleep", "60"], env=environment, cwd="/", **ids)]
    both.append(subprocess.Popen(["/bin/sleep", "60"], env=environment))
    try:
        deadline = time.monotonic() + 20
        while both[1].pid not in (found := marked(str(tmp_path))) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(found) == {both[1].pid}
    finally:
        for process in both:
            process.kill()
            process.wait()
