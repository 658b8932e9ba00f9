"""The log of a server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vane_dagster._secrets import keep
from vane_dagster.servers.server_log import ServerLog


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return str(tmp_path / "vane-server-a.b")


def written(prefix: str, *lines: bytes, size: int = 100) -> ServerLog:
    log = ServerLog(prefix, size)
    for line in lines:
        log.write(line)
    return log


def test_the_tail_goes_on_over_files(prefix):
    lines = [f"line {i}" for i in range(20)]
    log = written(prefix, *(f"{line}\n".encode() for line in lines))
    assert log.end == 150
    assert log.tail(lines=30) == "\n".join(lines)
    assert log.tail(lines=2) == "line 18\nline 19"
    assert log.tail(since=log.end - 8, lines=30) == "line 19"


def test_files_are_of_equal_size_however_much_is_written_at_once(prefix, tmp_path):
    log = written(prefix, b"x" * 250 + b"\n")
    assert log.end == 251
    assert log.path == f"{prefix}.2.log"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "vane-server-a.b.1.log",
        "vane-server-a.b.2.log",
    ]


def test_the_tail_begins_with_a_whole_line_so_that_no_secret_is_divided(prefix):
    keep(["of-this-test-alone"])
    log = written(prefix, *(b"is of-this-test-alone\n" for _ in range(20)), size=100)
    assert log.tail(lines=1000) == "\n".join(["is ***"] * 6), "of the last two files"


def test_a_link_or_file_of_another_user_in_place_of_the_log_is_left_alone(prefix, tmp_path):
    (tmp_path / "other").write_text("of someone else")
    os.symlink(tmp_path / "other", f"{prefix}.log")
    log = written(prefix, b"a line\n")
    assert log.tail() == ""
    assert (tmp_path / "other").read_text() == "of someone else"
