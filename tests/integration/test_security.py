"""What another user of the machine can do: nothing. The attacks are made as user `nobody`."""

from __future__ import annotations

import dataclasses
import grp
import hashlib
import http.client
import importlib.util
import io
import json
import os
import pwd
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

import vane_dagster as vd
from support.data import write_source
from support.results import Run, failure
from vane_dagster._private_folder import (
    is_private_folder,
    is_safe_to_import_from,
    private_folder,
    temporary_folder,
)
from vane_dagster.compute.connection import connect_environment
from vane_dagster.compute.local_head import Head, LocalHead
from vane_dagster.compute.processes import MARK, birth
from vane_dagster.errors import ComputeError, DefinitionError
from vane_dagster.fingerprint.bundle import CodeBundle, pack, unpack
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.worker import host

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


def as_nobody(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a shell script as another local user."""
    ids: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    command = ["/bin/sh", "-c", script]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, **ids, **options)


@pytest.fixture
def shared_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that all users share, as ``/tmp`` is."""
    folder = Path(tempfile.mkdtemp(prefix="vs-", dir="/tmp"))
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv(MARK, raising=False)
    yield folder
    shutil.rmtree(folder)


def mode(path: Path) -> int:
    return path.lstat().st_mode & 0o7777


# The rule for private folders.


def test_a_new_folder_and_its_parents_are_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert mode(made) == mode(made.parent) == 0o700
    assert private_folder(made) == made
    assert not is_private_folder(tmp_path / "missing")


def test_a_folder_that_others_can_only_read_becomes_private(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    private_folder(folder)
    assert mode(folder) == 0o700


def writable_by_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def writable_by_a_group(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, -1, NOBODY)
    folder.chmod(0o770)


def of_nobody(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)


def link(folder: Path) -> None:
    (folder.parent / "target").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "target")


def link_of_nobody(folder: Path) -> None:
    link(folder)
    os.lchown(folder, NOBODY, NOBODY)


def file(folder: Path) -> None:
    folder.write_text("")


PLANTED = [
    (writable_by_all, "a directory owned by user 0 with mode drwxrwxrwx"),
    (writable_by_a_group, "a directory owned by user 0 with mode drwxrwx---"),
    (of_nobody, "a directory owned by user 65534"),
    (link, "a symbolic link owned by user 0"),
    (link_of_nobody, "a symbolic link owned by user 65534"),
    (file, "a file owned by user 0"),
]


@as_root
@pytest.mark.parametrize(("plant", "found"), PLANTED)
def test_what_is_not_private_is_refused(
    tmp_path: Path, plant: Callable[[Path], None], found: str
) -> None:
    folder = tmp_path / "state"
    plant(folder)
    before = mode(folder)
    expected = rf"{folder} is not private: it is {found}.* expected a directory owned by user 0 "
    for check in (private_folder, is_private_folder):
        with pytest.raises(ComputeError, match=expected + r".*Remove it, or set VANE_X to"):
            check(folder, "VANE_X")
    assert mode(folder) == before


@as_root
@pytest.mark.parametrize("plant", [writable_by_all, writable_by_a_group, of_nobody, link_of_nobody])
def test_a_parent_that_others_can_replace_is_refused(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    plant(tmp_path / "parent")
    folder = tmp_path / "parent" / "between" / "state"
    expected = rf"{folder} is not private: {tmp_path}/parent is a .*Correct its owner or mode"
    with pytest.raises(ComputeError, match=expected):
        private_folder(folder)


def test_parents_that_only_root_and_this_user_can_replace_are_accepted(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    (tmp_path / "real").mkdir()
    (shared / "link").symlink_to(Path("..", "real"))
    made = private_folder(shared / "link" / "state")
    assert made == shared / "link" / "state"
    assert mode(tmp_path / "real" / "state") == 0o700
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises((ComputeError, OSError)):
        private_folder(tmp_path / "loop" / "state")


OWN_GROUP = 4242


@as_root
@pytest.mark.parametrize("others", ["nobody", "primary", "listed"])
def test_only_a_group_of_this_user_alone_may_write_to_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    """As with umask 002; a user whose primary group it is is not listed as its member."""
    (tmp_path / "local").mkdir()
    os.chown(tmp_path / "local", -1, OWN_GROUP)
    (tmp_path / "local").chmod(0o775)
    user = pwd.struct_passwd(("ann", "x", 0, OWN_GROUP, "", "/", "/bin/sh"))
    other = pwd.struct_passwd(("bob", "x", 7, OWN_GROUP, "", "/", "/bin/sh"))
    listed = ["bob"] if others == "listed" else []
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(pwd, "getpwall", lambda: [user, other] if others == "primary" else [user])
    group = grp.struct_group(("ann", "x", OWN_GROUP, listed))
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)
    if others == "nobody":
        assert private_folder(tmp_path / "local" / "state")
    else:
        with pytest.raises(ComputeError, match=f"{tmp_path}/local is a directory owned by user 0"):
            private_folder(tmp_path / "local" / "state")


@as_root
def test_group_0_is_not_a_group_of_root_alone(tmp_path: Path) -> None:
    """Containers give it to users of any number, as OpenShift does."""
    (tmp_path / "local").mkdir()
    os.chown(tmp_path / "local", 0, 0)
    (tmp_path / "local").chmod(0o775)
    with pytest.raises(ComputeError, match=r"is not private: .* with mode drwxrwxr-x"):
        private_folder(tmp_path / "local" / "state")


@as_root
@pytest.mark.parametrize("plant", [writable_by_all, of_nobody, link_of_nobody])
def test_nothing_is_created_below_a_parent_that_is_refused(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    plant(tmp_path / "parent")
    with pytest.raises(ComputeError):
        private_folder(tmp_path / "parent" / "a" / "b")
    assert list((tmp_path / "parent").resolve().iterdir()) == []


@as_root
def test_users_of_a_parent_can_be_trusted_but_not_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container with a single user, whose volumes belong to root and are writable."""
    volume = tmp_path / "data"
    writable_by_all(volume)
    hint = f"In a container with a single user, set VANE_DAGSTER_TRUST_PARENTS={volume} "
    with pytest.raises(ComputeError, match=hint):
        private_folder(volume / "state")
    monkeypatch.setenv("VANE_DAGSTER_TRUST_PARENTS", f"/elsewhere:{volume}/")
    assert mode(private_folder(volume / "state")) == 0o700
    for plant in (writable_by_all, of_nobody, link_of_nobody):
        shutil.rmtree(volume / "state")
        plant(volume / "state")
        with pytest.raises(ComputeError, match="state is not private: it is a "):
            private_folder(volume / "state")
    os.symlink(volume, tmp_path / "link")
    os.lchown(tmp_path / "link", NOBODY, NOBODY)
    monkeypatch.setenv("VANE_DAGSTER_TRUST_PARENTS", f"{tmp_path}/link:{volume}")
    with pytest.raises(ComputeError, match="link is a symbolic link owned by user 65534"):
        private_folder(tmp_path / "link" / "other")
    monkeypatch.setenv("VANE_DAGSTER_TRUST_PARENTS", ".:")
    with pytest.raises(ComputeError, match="is not private"):
        private_folder(volume / "other")
    monkeypatch.setenv("VANE_DAGSTER_TRUST_PARENTS", str(volume))
    assert not is_safe_to_import_from(volume)


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


@as_root
def test_a_link_of_another_user_above_the_state_folder_is_refused(
    shared_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert as_nobody(f"ln -s {tmp_path} {shared_tmp}/link").returncode == 0
    monkeypatch.setenv("VANE_DAGSTER_HOME", str(shared_tmp / "link"))
    for local in (LocalHead(), LocalHead(home=shared_tmp / "link")):
        with pytest.raises(ComputeError, match=r"link is a symbolic link owned by user 65534"):
            local.ensure()
    assert list(tmp_path.iterdir()) == []


@as_root
def test_a_container_with_writable_volumes_can_be_used(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a head and workers need is then below the volume."""
    volume = shared_tmp
    volume.chmod(0o777)
    monkeypatch.setenv("VANE_DAGSTER_HOME", str(volume / "h"))
    monkeypatch.setenv("TMPDIR", str(volume / "t"))
    local = LocalHead()
    private = (
        lambda: private_folder(local.folder, "VANE_DAGSTER_HOME"),
        lambda: private_folder(local.temp_dir),
        host.code_root,
    )
    for make in private:
        (volume / "t").mkdir(mode=0o700, exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.delenv("VANE_DAGSTER_TRUST_PARENTS", raising=False)
        with pytest.raises(ComputeError, match=f"{volume} is a directory owned by user 0"):
            make()
        monkeypatch.setenv("VANE_DAGSTER_TRUST_PARENTS", str(volume))
        assert volume in make().parents


def test_the_heads_temporary_folder_follows_a_short_state_folder(tmp_path: Path) -> None:
    """It depends on nothing else, so that every process finds the same one."""
    local = LocalHead(home="/data/own")
    assert local.temp_dir == local.folder / "t"
    session = "session_2026-11-21_05-15-26_123456_1234567"
    assert len(f"{local.temp_dir}/r/{session}/sockets/plasma_store") <= 103
    deep = LocalHead(home=tmp_path / ("d" * 60))
    assert re.fullmatch(rf"/tmp/vane-{os.getuid()}-[0-9a-f]{{8}}", str(deep.temp_dir))


@as_root
def test_a_refused_temporary_folder_of_the_head_names_the_setting(tmp_path: Path) -> None:
    local = LocalHead(home=tmp_path / ("d" * 60))
    of_nobody(local.temp_dir)
    try:
        with pytest.raises(ComputeError, match=r"set VANE_DAGSTER_HOME, in at most \d+ bytes, to"):
            local.ensure()
    finally:
        local.temp_dir.rmdir()


# Code.


def archive(**modules: str) -> tuple[bytes, str]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for name, text in modules.items():
            opened.writestr(f"{name.replace('__in__', '/')}.py", text)
    return buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest()


@as_root
@pytest.mark.parametrize("plant", [PLANTED[0][0], PLANTED[2][0], PLANTED[4][0]])
def test_the_code_root_is_not_taken_from_another_user(
    shared_tmp: Path, plant: Callable[[Path], None]
) -> None:
    root = shared_tmp / "vane-code-0"
    plant(root)
    with pytest.raises(ComputeError, match=f"{root} is not private.* set TMPDIR to a folder"):
        host.code_root()


def test_the_code_root_is_below_the_heads_folder(
    shared_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.code_root() == shared_tmp / f"vane-code-{os.geteuid()}"
    assert mode(host.code_root()) == 0o700
    monkeypatch.setenv(MARK, str(tmp_path / "head"))
    assert host.code_root() == tmp_path / "head" / "code"
    assert mode(host.code_root()) == mode(tmp_path / "head") == 0o700


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
    assert "vane-code-0 is not private: it is a symbolic link owned by user 65534" in failure(
        result
    )


def bundle(obj: Any) -> CodeBundle:
    return pack(code_identity(obj).modules, obj)


def changed(folder: Path) -> None:
    (folder / "a.py").write_text("x = 2\n")


def extra_module(folder: Path) -> None:
    (folder / "json.py").write_text("")


def extra_folder(folder: Path) -> None:
    (folder / "more").mkdir()
    (folder / "more" / "evil.py").write_text("")


def missing(folder: Path) -> None:
    (folder / "pkg" / "b.py").unlink()


def compiled(folder: Path) -> None:
    py_compile.compile(str(folder / "a.py"), cfile=str(folder / "c.pyc"))


def cached(folder: Path) -> None:
    """A compiled module of other code, with the source's time and size."""
    source, stamp = folder / "a.py", (folder / "a.py").stat()
    text = source.read_text()
    source.write_text("x = 2\n")
    os.utime(source, (stamp.st_atime, stamp.st_mtime))
    py_compile.compile(str(source))
    source.write_text(text)
    os.utime(source, (stamp.st_atime, stamp.st_mtime))


def module_is_a_link(folder: Path) -> None:
    target = folder.parent / "same.py"
    target.write_text((folder / "a.py").read_text())
    (folder / "a.py").unlink()
    (folder / "a.py").symlink_to(target)


def package_is_a_link(folder: Path) -> None:
    shutil.move(folder / "pkg", folder.parent / "pkg")
    (folder / "pkg").symlink_to(folder.parent / "pkg")


def folder_is_a_link(folder: Path) -> None:
    shutil.move(folder, folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def folder_is_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


TAMPERED = [
    changed, extra_module, extra_folder, missing, compiled, cached, module_is_a_link,
    package_is_a_link, folder_is_a_link, folder_is_a_file,
]  # fmt: skip


@pytest.mark.parametrize("tamper", TAMPERED)
def test_code_that_differs_from_the_archive_is_replaced(
    tmp_path: Path, tamper: Callable[[Path], None]
) -> None:
    data, digest = archive(a="x = 1\n", pkg__in__b="")
    folder = unpack(data, digest, tmp_path / "code")
    tamper(folder)
    assert unpack(data, digest, tmp_path / "code") == folder
    assert not folder.is_symlink()
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    assert files == {"a.py", "pkg/b.py"}
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert imported(folder / "a.py").x == 1
    assert not list(folder.parent.glob(".partial-*"))


def test_code_that_is_right_is_not_written_again(tmp_path: Path) -> None:
    data, digest = archive(a="x = 1\n")
    before = (unpack(data, digest, tmp_path / "code") / "a.py").stat().st_ino
    assert (unpack(data, digest, tmp_path / "code") / "a.py").stat().st_ino == before


def imported(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("under_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The local Ray head.


def record(local: LocalHead, token: Path) -> Head:
    """A head as a record says it, whose processes are this one's."""
    return Head(
        address="127.0.0.1:1",
        pid=os.getpid(),
        birth=str(birth(os.getpid())),
        raylet_pid=os.getpid(),
        raylet_birth=str(birth(os.getpid())),
        session_dir="/",
        token_path=str(token),
        started_at=time.time(),
        ray_version=local.ray_version,
        python_version="3",
        prefix=sys.prefix,
        settings=(),
    )


@as_root
@pytest.mark.parametrize("plant", [writable_by_all, of_nobody, link_of_nobody])
def test_a_planted_record_is_not_a_head(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    """It would connect drivers to another user's head, whose objects they unpickle."""
    local = LocalHead(home=tmp_path)
    plant(local.folder)
    planted = json.dumps(dataclasses.asdict(record(local, local.folder / "token")))
    (local.folder / "head.json").write_text(planted)
    for use in (local.find, local.ensure, local.stop):
        with pytest.raises(ComputeError, match=r"is not private.* set VANE_DAGSTER_HOME to"):
            use()


def test_a_token_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("f" * 64)
    token.chmod(0o600)
    head = record(LocalHead(home=tmp_path), token)
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

    from vane_dagster.compute import processes

    cluster.connect(True)
    local = LocalHead(name="tests")
    import ray

    holder = ray.remote(num_cpus=0)(type("Holder", (), {"ping": lambda self: None})).remote()
    ray.get(holder.ping.remote())
    psutil = processes._psutil()
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
            assert status_of(port, path) in (None, 401, 403, 404, 405), f"{path} at port {port}"
    for method, found in answers.items():
        assert "UNAUTHENTICATED" in found, f"{method}: {found}"
        assert found <= {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE"}, f"{method}: {found}"
    del holder


def status_of(port: int, path: str) -> int | None:
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
def test_a_plan_of_faults_cannot_be_replaced_by_another_user(shared_tmp: Path) -> None:
    from vane_dagster.testing import CallFault, faults

    (shared_tmp / "shared").mkdir(mode=0o755)
    with faults(CallFault("p/s", ids=[1]), folder=shared_tmp / "shared"):
        (place,) = (shared_tmp / "shared").iterdir()
        assert as_nobody(f"touch {place}/fired-0-1").returncode == 0
        plan = next(file for file in place.iterdir() if file.name != "fired-0-1")
        assert as_nobody(f"mv {plan} {place}/gone").returncode != 0
        assert as_nobody(f"echo > {plan}").returncode != 0


@as_root
def test_a_plan_of_faults_exists_before_others_can_write_beside_it(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a link planted in its place has the test write into any file of this user."""
    from vane_dagster.testing import CallFault, faults

    victim = shared_tmp / "victim"
    victim.write_text("untouched")
    chmod = Path.chmod

    def chmod_then_attack(path: Path, mode: int) -> None:
        chmod(path, mode)
        as_nobody(f"ln -s {victim} {path}/plan.json")

    monkeypatch.setattr(Path, "chmod", chmod_then_attack)
    with faults(CallFault("p/s", ids=[1]), folder=shared_tmp) as injected:
        assert injected.fired == (0,)
    assert victim.read_text() == "untouched"


SPILLING = "SELECT * FROM (SELECT md5(range::VARCHAR) x, range r FROM range(600000) ORDER BY 1)"


def test_duckdb_does_not_spill_into_the_current_folder(
    shared_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vane_dagster._private_folder import user_folder
    from vane_dagster.types.duckdb_connection import connect, spill_below

    monkeypatch.chdir(tmp_path)
    (tmp_path / ".tmp").mkdir()
    seen: set[str] = set()

    def listed(index: int) -> int:
        seen.update(str(path.relative_to(shared_tmp)) for path in shared_tmp.rglob("*"))
        assert list((tmp_path / ".tmp").iterdir()) == []
        return index

    with connect() as connection:
        connection.execute("SET memory_limit='40MB'")
        with pytest.raises(duckdb.OutOfMemoryException):
            connection.execute(f"{SPILLING} LIMIT 3 OFFSET 500000").fetchall()
    with connect() as connection:
        connection.execute("SET memory_limit='40MB'")
        connection.create_function("listed", listed, ["BIGINT"], "BIGINT", side_effects=True)
        spill_below(connection, user_folder("spill"))
        query = f"SELECT listed(r) FROM ({SPILLING} LIMIT 3 OFFSET 500000)"
        connection.execute(query).fetchall()
    own = f"vane-spill-{os.geteuid()}"
    assert mode(shared_tmp / own) == 0o700
    assert any(path.startswith(f"{own}/{os.getpid()}-") for path in seen)
    assert list((shared_tmp / own).iterdir()) == []


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
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert Path(done.stdout.strip()).parent == expected, done.stderr
        assert mode(expected) == 0o700


@pytest.mark.parametrize("recorded", ["nobody", "writable", "link", "missing", "own", "named"])
@as_root
def test_a_cluster_that_another_user_recorded_is_not_auto(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch, recorded: str
) -> None:
    """Its objects would be unpickled; what another user recorded is not even connected to."""
    from vane_dagster.compute.connection import recorded_address
    from vane_dagster.orchestration.resources import connect_address

    monkeypatch.setenv("RAY_TMPDIR", str(shared_tmp))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (shared_tmp / "ray").mkdir()
    (shared_tmp / "ray").chmod(0o777)
    file = shared_tmp / "ray" / "ray_current_cluster"
    if recorded != "missing":
        file.write_text("127.0.0.1:1\n")
    if recorded == "nobody":
        os.chown(file, NOBODY, NOBODY)
    elif recorded == "writable":
        file.chmod(0o666)
    elif recorded == "link":
        file.rename(shared_tmp / "other")
        file.symlink_to(shared_tmp / "other")
    if recorded == "own":
        assert recorded_address("auto") == recorded_address(None) == "127.0.0.1:1"
    elif recorded == "named":
        assert recorded_address("10.0.0.1:6379") == "10.0.0.1:6379"
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        assert recorded_address("auto") == "auto"
    else:
        monkeypatch.setattr("ray.is_initialized", lambda: False)
        with pytest.raises(ComputeError, match=r"ray_current_cluster.* Name the address"):
            connect_address("auto", {})


def test_temporary_folders_come_from_one_place() -> None:
    """A use of `tempfile` elsewhere would escape the rule for private folders."""
    package = Path(next(iter(vd.__path__)))
    using = {file.name for file in package.rglob("*.py") if "tempfile" in file.read_text()}
    assert using == {"private_folder.py"}
    examples = (package.parent / "examples").glob("*.py")
    assert [file.name for file in examples if "tempfile" in file.read_text()] == []


@as_root
def test_temporary_folders_are_not_made_where_others_can_replace_them(shared_tmp: Path) -> None:
    shared_tmp.chmod(0o777)
    with pytest.raises(ComputeError, match=r"set TMPDIR to a folder"), temporary_folder():
        pass
    assert list(shared_tmp.iterdir()) == []
    shared_tmp.chmod(0o1777)
    with temporary_folder() as folder:
        assert mode(folder) == 0o700
    assert not folder.exists()


def test_sockets_of_vllm_are_in_a_private_folder(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network_utils = pytest.importorskip("vllm.utils.network_utils")
    from vane_dagster.providers.vllm_engine import engine_folder

    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    folder = engine_folder()
    assert folder.parent == shared_tmp
    assert mode(folder) == 0o700
    assert network_utils.get_open_zmq_ipc_path().startswith(f"ipc://{folder}/")


def test_only_what_a_driver_sends_is_unpickled() -> None:
    """Stores, caches and state folders hold JSON and Parquet: who writes there runs no code."""
    package = Path(next(iter(vd.__path__)))
    using = {file.name for file in package.rglob("*.py") if "pickle.load" in file.read_text()}
    assert using == {"calls.py", "shipping.py"}


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


@as_root
def test_the_demo_is_not_run_from_a_checkout_of_another_user(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = shared_tmp / "ran"
    code = PLANTED_IMPORT.format(ran=ran)
    planted = as_nobody(
        f"cd {shared_tmp} && mkdir definitions && cat > definitions/demo.py"
        " && echo 'name = \"vane-dagster\"' > pyproject.toml",
        input=code,
    )
    assert planted.returncode == 0, planted.stderr
    (shared_tmp / "work").mkdir()
    monkeypatch.chdir(shared_tmp / "work")
    from vane_dagster.cli.demo import _demo_module

    with pytest.raises(DefinitionError, match=r"definitions or a folder above it belongs to"):
        _demo_module("demo")
    assert not ran.exists()


@as_root
@pytest.mark.parametrize("owner", ["nobody", "root"])
def test_the_demo_is_not_run_beside_modules_of_another_user(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    """The demo's own code is genuine, but what it imports is found in the same folder first."""
    genuine = shared_tmp / "genuine"
    (genuine / "definitions").mkdir(parents=True, mode=0o755)
    genuine.chmod(0o755)
    (genuine / "definitions" / "demo.py").write_text("import planted\n")
    folder = shared_tmp if owner == "root" else shared_tmp / "planted"
    planted = as_nobody(
        f"mkdir -p {folder} && cd {folder} && touch planted.py"
        f" && ln -s {genuine}/definitions definitions && echo 'name = \"vane-dagster\"' >"
        " pyproject.toml"
    )
    assert planted.returncode == 0, planted.stderr
    if owner == "root":
        (folder / "definitions").unlink()
        (genuine / "definitions").rename(folder / "definitions")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    from vane_dagster.cli.demo import _demo_module

    with pytest.raises(DefinitionError, match=r"definitions or a folder above it belongs to"):
        _demo_module("demo")
    assert str(folder) not in sys.path


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


def test_the_threat_model_names_tests_that_exist() -> None:
    root = Path(next(iter(vd.__path__))).parent
    named = re.findall(r"`(test_\w+)`", (root / "docs" / "security.md").read_text())
    texts = "".join(file.read_text() for file in (root / "tests").rglob("test_*.py"))
    assert len(named) > 15
    assert [name for name in named if f"def {name}(" not in texts] == []
