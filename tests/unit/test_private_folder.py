"""Folders that other users of the machine cannot write to."""

from __future__ import annotations

import dataclasses
import grp
import importlib.util
import io
import json
import os
import pwd
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import duckdb
import pytest

import vane_dagster as vd
from support.attacks import (
    NOBODY,
    acting_as_nobody,
    as_root,
    file,
    link,
    link_of_nobody,
    mode,
    of_nobody,
    shared_tmp,  # noqa: F401  # fixtures
    writable_by_all,
)
from support.heads import HEAD, accepting
from vane_dagster._private_folder import (
    MARK,
    is_private_folder,
    is_safe_to_import_from,
    private_folder,
    temporary_folder,
    worker_folder,
)
from vane_dagster.compute import local_backend
from vane_dagster.compute.connection import connect_environment
from vane_dagster.compute.local_head import LocalHead
from vane_dagster.errors import ComputeError
from vane_dagster.types.duckdb_connection import connect
from vane_dagster.worker import database
from vane_dagster.worker.user_code import unpack

# The rule for private folders.


def test_a_new_folder_and_its_parents_are_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert mode(made) == mode(made.parent) == 0o700
    made.chmod(0o755)
    assert private_folder(made) == made
    assert mode(made) == 0o700, "what others can only read becomes private"
    assert not is_private_folder(tmp_path / "missing")


def writable_by_a_group(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, -1, NOBODY)
    folder.chmod(0o770)


PLANTED = [
    (writable_by_all, "user 0 with mode drwxrwxrwx"),
    (writable_by_a_group, "user 0 with mode drwxrwx---"),
    (of_nobody, "user 65534 with mode d"),
    (link, "user 0 with mode l"),
    (link_of_nobody, "user 65534 with mode l"),
    (file, "user 0 with mode -"),
]


@as_root
@pytest.mark.parametrize(("plant", "found"), PLANTED)
def test_what_is_not_private_is_refused(
    tmp_path: Path, plant: Callable[[Path], None], found: str
) -> None:
    folder = tmp_path / "state"
    plant(folder)
    before = mode(folder)
    expected = (
        rf"{folder} is not private: it belongs to {found}.* expected a directory owned by user 0 "
    )
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
    expected = rf"{folder} is not private: {tmp_path}/parent belongs to .*Correct its owner or mode"
    with pytest.raises(ComputeError, match=expected):
        private_folder(folder)
    assert list((tmp_path / "parent").resolve().iterdir()) == []


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
@pytest.mark.parametrize("others", ["nobody", "primary", "listed", "group 0"])
def test_only_a_group_of_this_user_alone_may_write_to_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    """As with umask 002; a user whose primary group it is is not listed as its member.

    Containers give group 0 to users of any number.
    """
    number = 0 if others == "group 0" else OWN_GROUP
    (tmp_path / "local").mkdir()
    os.chown(tmp_path / "local", -1, number)
    (tmp_path / "local").chmod(0o775)
    user = pwd.struct_passwd(("ann", "x", 0, number, "", "/", "/bin/sh"))
    other = pwd.struct_passwd(("bob", "x", 7, number, "", "/", "/bin/sh"))
    listed = ["bob"] if others == "listed" else []
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(pwd, "getpwall", lambda: [user, other] if others == "primary" else [user])
    group = grp.struct_group(("ann", "x", number, listed))
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)
    if others == "nobody":
        assert private_folder(tmp_path / "local" / "state")
    else:
        with pytest.raises(ComputeError, match=f"{tmp_path}/local belongs to user 0"):
            private_folder(tmp_path / "local" / "state")


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
        with pytest.raises(ComputeError, match="state is not private: it belongs to"):
            private_folder(volume / "state")
    os.symlink(volume, tmp_path / "link")
    os.lchown(tmp_path / "link", NOBODY, NOBODY)
    monkeypatch.setenv("VANE_DAGSTER_TRUST_PARENTS", f"{tmp_path}/link:{volume}")
    with pytest.raises(ComputeError, match="link belongs to user 65534 with mode l"):
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
    with acting_as_nobody():
        (shared_tmp / "link").symlink_to(own)
    assert not is_safe_to_import_from(shared_tmp / "link")
    assert not is_safe_to_import_from(shared_tmp / "link" / "below" / ".." / "below")
    assert not is_safe_to_import_from(shared_tmp)
    monkeypatch.chdir(shared_tmp / "link")
    assert is_safe_to_import_from(".")  # the process is there, whatever becomes of the link


# The local Ray head.


def test_the_heads_temporary_folder_follows_a_short_state_folder(tmp_path: Path) -> None:
    """It depends on nothing else, so that every process finds the same one."""
    local = LocalHead(home="/data/own")
    assert local.temp_dir == local.folder / "t"
    session = "session_2026-11-21_05-15-26_123456_1234567"
    assert len(f"{local.temp_dir}/r/{session}/sockets/plasma_store") <= 103
    deep = LocalHead(home=tmp_path / ("d" * 60))
    assert re.fullmatch(rf"/tmp/vane-{os.getuid()}-[0-9a-f]{{8}}", str(deep.temp_dir))


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


# Local workers.


@as_root
def test_another_user_cannot_read_tables_of_local_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_backend, "Guard", Mock())
    backend = local_backend.LocalBackend(num_cpus=1)
    try:
        table = Path(backend.folder, "a.arrow")
        table.write_text("rows")
        with acting_as_nobody():
            for attack in (table.read_text, lambda: list(table.parent.iterdir())):
                with pytest.raises(PermissionError):
                    attack()
    finally:
        shutil.rmtree(backend.folder)


# Code.


def archive(**modules: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for name, text in modules.items():
            opened.writestr(f"{name.replace('__in__', '/')}.py", text)
    return buffer.getvalue()


@as_root
def test_the_code_root_is_not_taken_from_another_user(shared_tmp: Path) -> None:
    root = shared_tmp / "vane-code-0"
    of_nobody(root)
    with pytest.raises(ComputeError, match=f"{root} is not private.* set TMPDIR to a folder"):
        worker_folder("code")


def test_the_code_root_is_below_the_heads_folder(
    shared_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker_folder("code") == shared_tmp / f"vane-code-{os.geteuid()}"
    assert mode(worker_folder("code")) == 0o700
    monkeypatch.setenv(MARK, str(tmp_path / "head"))
    assert worker_folder("code") == tmp_path / "head" / "code"
    assert mode(worker_folder("code")) == mode(tmp_path / "head") == 0o700


def changed(folder: Path) -> None:
    (folder / "a.py").write_text("x = 2\n")


def missing(folder: Path) -> None:
    (folder / "pkg" / "b.py").unlink()


def folder_is_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize("tamper", [changed, missing, folder_is_a_file])
def test_code_that_differs_from_the_archive_is_replaced(
    tmp_path: Path, tamper: Callable[[Path], None]
) -> None:
    data = archive(a="x = 1\n", pkg__in__b="")
    folder = unpack(data, tmp_path / "code")
    before = (folder / "a.py").stat().st_ino
    assert unpack(data, tmp_path / "code") == folder
    assert (folder / "a.py").stat().st_ino == before, "what is right is not written again"
    tamper(folder)
    assert unpack(data, tmp_path / "code") == folder
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"a.py", "pkg/b.py"}
    assert imported(folder / "a.py").x == 1
    assert not list(folder.parent.glob(".partial-*"))


def imported(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("under_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SPILLING = "SELECT * FROM (SELECT md5(range::VARCHAR) x, range r FROM range(600000) ORDER BY 1)"


def test_duckdb_does_not_spill_into_the_current_folder(
    shared_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vane_dagster._private_folder import user_folder
    from vane_dagster.types.duckdb_connection import spill_below

    monkeypatch.chdir(tmp_path)
    (tmp_path / ".tmp").mkdir()
    paths: set[str] = set()

    def listed(index: int) -> int:
        paths.update(str(path.relative_to(shared_tmp)) for path in shared_tmp.rglob("*"))
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
    assert any(path.startswith(f"{own}/{os.getpid()}-") for path in paths)
    assert list((shared_tmp / own).iterdir()) == []


def test_duckdb_of_workers_spills_into_a_private_folder(
    shared_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process into a folder of its own: DuckDB's files have the same names in all."""
    for head, expected in (("", shared_tmp / f"vane-spill-{os.geteuid()}"),
                           (str(tmp_path / "h"), tmp_path / "h" / "spill")):  # fmt: skip
        monkeypatch.setenv(MARK, head)
        with connect() as own:
            monkeypatch.setattr(database, "shared", lambda own=own: own)
            opened = database.connection.__wrapped__()
            (place,) = opened.execute("SELECT current_setting('temp_directory')").fetchone()
        assert Path(place).parent == expected
        assert Path(place).name.startswith(f"{os.getpid()}-")
        assert mode(expected) == 0o700


def test_a_cluster_that_another_user_recorded_is_not_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would look into files of any user; its objects would be unpickled."""
    from vane_dagster.compute.connection import connect_address, named_address

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert (named_address(None), named_address("10.0.0.1:6379")) == ("local", "10.0.0.1:6379")
    with pytest.raises(ComputeError, match="RAY_ADDRESS, which is not set"):
        connect_address("auto", {})
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert (named_address(None), named_address("auto")) == (None, "auto")


def test_temporary_folders_come_from_one_place() -> None:
    """A use of `tempfile` elsewhere would escape the rule for private folders."""
    package = Path(next(iter(vd.__path__)))
    using = {file.name for file in package.rglob("*.py") if "import tempfile" in file.read_text()}
    assert using == {"_private_folder.py"}
    examples = (package.parent / "examples").glob("*.py")
    assert [file.name for file in examples if "import tempfile" in file.read_text()] == []


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


def test_only_what_a_driver_sends_is_unpickled() -> None:
    """Stores, caches and state folders hold JSON and Parquet: who writes there runs no code."""
    package = Path(next(iter(vd.__path__)))
    reads = re.compile(r"pickle\.(load|Unpickler)")
    using = {file.name for file in package.rglob("*.py") if reads.search(file.read_text())}
    assert using == {"prompt_function.py", "triton_runner.py", "user_code.py"}


def test_the_threat_model_names_tests_that_exist() -> None:
    root = Path(next(iter(vd.__path__))).parent
    named = re.findall(r"`(test_\w+)`", (root / "docs" / "security.md").read_text())
    texts = "".join(file.read_text() for file in (root / "tests").rglob("test_*.py"))
    assert len(named) > 15
    assert [name for name in named if f"def {name}(" not in texts] == []


# The state folder


def test_home_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VANE_DAGSTER_HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert LocalHead().folder.parent == tmp_path / ".local/state/vane_dagster"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert LocalHead().folder.parent == tmp_path / "state/vane_dagster"
    monkeypatch.setenv("VANE_DAGSTER_HOME", str(tmp_path / "own"))
    assert LocalHead().folder.parent == tmp_path / "own"
    assert LocalHead(home=tmp_path / "given").folder.parent == tmp_path / "given"
