"""The log of a server."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from vane_dagster._secrets import keep
from vane_dagster.servers import server_log
from vane_dagster.servers.server_log import ServerLog


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
