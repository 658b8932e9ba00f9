"""Processes of servers, and their logs."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from support.heads import free_port
from vane_dagster._secrets import keep
from vane_dagster.servers import server_log, triton_runner
from vane_dagster.servers.launch import Endpoint, health_problem
from vane_dagster.servers.process import _filled
from vane_dagster.servers.server_log import ServerLog


def test_placeholders_are_replaced_literally():
    values = {"port": "8000", "host": "::1"}
    assert _filled('{"a": {port}, "{b}": "{host}:{port}"}', values) == (
        '{"a": 8000, "{b}": "::1:8000"}'
    )


def test_triton_finds_the_shared_library_of_its_interpreter(monkeypatch, tmp_path):
    library = tmp_path / "lib" / "libpython{}.{}.so.1.0".format(*sys.version_info[:2])
    library.parent.mkdir()
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/cuda/lib")
    triton_runner._let_triton_find_python()
    assert os.environ["LD_LIBRARY_PATH"] == "/cuda/lib"
    library.touch()
    triton_runner._let_triton_find_python()
    assert os.environ["LD_LIBRARY_PATH"] == f"{library.parent}:/cuda/lib"


@pytest.mark.parametrize("has_model", [False, True])
def test_triton_names_a_missing_package_with_the_environment(has_model, monkeypatch):
    def serves(ports, *model):
        assert (ports, model) == ([8000, 8001, 8002], ("/model",) * has_model)
        import pytriton_of_nobody  # noqa: F401  # its absence is tested

    for name in ("TMPDIR", "PYTRITON_HOME", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(triton_runner, "_load", lambda cloudpickle, payload: serves)
    with pytest.raises(SystemExit) as ended:
        triton_runner.main(["c", "p", "8000", "8001", "8002", *["/model"] * has_model])
    assert str(ended.value) == (
        f"No module named 'pytriton_of_nobody'. Install it in the environment of {sys.executable}, "
        "where the server runs, or name another interpreter with TritonServer(python=...)"
    )


def test_triton_refuses_another_version_of_python(tmp_path):
    (tmp_path / "payload").write_bytes(b"3.7\n\x80")
    with pytest.raises(SystemExit, match=r"pickled by Python 3.7") as ended:
        triton_runner._load("c", str(tmp_path / "payload"))
    own = "{}.{}".format(*sys.version_info[:2])
    assert f"{sys.executable} is Python {own}. " in str(ended.value)
    assert "an environment with Python 3.7" in str(ended.value)


def test_a_health_check_says_what_is_wrong():
    nowhere = Endpoint(f"http://127.0.0.1:{free_port()}")
    assert health_problem(nowhere, 1.0).startswith("ConnectionRefusedError")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "vane-server-a.b.log")


def written(path: str, *lines: bytes, size: int = 100) -> ServerLog:
    log = ServerLog(path, size)
    for line in lines:
        log.write(line)
    return log


def test_a_full_file_is_followed_by_another_and_the_tail_goes_on(path, tmp_path):
    lines = [f"line {i}" for i in range(40)]
    log = written(path, *(f"{line}\n".encode() for line in lines))
    assert log.tail(lines=2) == "line 38\nline 39"
    assert log.tail(since=log.end - 8, lines=50) == "line 39"
    assert log.tail(lines=50) == "\n".join(lines)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "vane-server-a.b.log",
        "vane-server-a.b.log.1",
    ]
    kept = Path(f"{path}.1").read_text() + Path(path).read_text()
    assert "\n".join(lines).endswith(kept.rstrip())
    log.close()


def test_the_tail_begins_with_a_whole_line_so_that_no_secret_is_divided(path, monkeypatch):
    monkeypatch.setattr(server_log, "_TAIL_BYTES", 150)
    keep(["of-this-test-alone"])
    log = written(path, *(b"is of-this-test-alone\n" for _ in range(20)))
    assert log.tail(lines=1000) == "\n".join(["is ***"] * 6)


def test_the_log_is_private(path, tmp_path):
    """A link or file of another user in its place is left alone."""
    written(path, b"a line\n").close()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    os.unlink(path)
    (tmp_path / "other").write_text("of someone else")
    os.symlink(tmp_path / "other", path)
    assert written(path, b"a line\n").tail() == "a line"
    assert (tmp_path / "other").read_text() == "of someone else"
