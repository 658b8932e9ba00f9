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


def test_positions_go_on_over_files(prefix):
    lines = [f"line {i}\n".encode() for i in range(25)]
    log = written(prefix, *lines)
    assert log.end == len(b"".join(lines)) == 190
    assert log.read(0, 1000) == (b"".join(lines), 190)
    assert log.read(95, 1000) == (b"".join(lines)[95:], 190)
    assert log.read(190, 1000) == (b"", 190)


def test_files_are_of_equal_size_however_much_is_written_at_once(prefix, tmp_path):
    log = written(prefix, b"x" * 250 + b"\n")
    assert log.end == 251
    assert log.path == f"{prefix}.2.log"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "vane-server-a.b.1.log",
        "vane-server-a.b.2.log",
    ]


def test_a_deleted_position_reads_from_the_oldest_file(prefix):
    lines = [f"line {i:3}\n".encode() for i in range(100)]
    log = written(prefix, *lines)
    text, end = log.read(0, 10_000)
    assert end == 900
    assert text == b"".join(lines)[700:]


def test_a_negative_offset_counts_from_the_end(prefix):
    log = written(prefix, b"one\ntwo\n")
    assert log.read(-4, 100) == (b"two\n", 8)
    assert log.read(-400, 100) == (b"one\ntwo\n", 8)


def test_a_part_ends_with_a_line_so_that_no_secret_is_divided(prefix):
    keep(["of-this-test-alone"])
    log = written(prefix, b"first\nis of-this-test-alone\n")
    assert log.read(0, 12) == (b"first\n", 6)
    assert log.read(6, 100) == (b"is ***\n", 28)


def test_a_long_line_is_read_in_parts(prefix):
    log = written(prefix, b"x" * 50)
    assert log.read(0, 20) == (b"x" * 20, 20)


def test_the_tail_has_the_last_lines_since_a_position(prefix):
    log = written(prefix, *(f"{i}\n".encode() for i in range(50)), size=1000)
    assert log.tail(lines=2) == "48\n49"
    assert log.tail(since=log.end - 3, lines=30) == "49"


def test_a_log_that_does_not_exist_yet_is_empty(prefix):
    log = ServerLog(prefix, 100)
    assert (log.end, log.read(0, 10), log.tail()) == (0, (b"", 0), "")
    assert log.path == f"{prefix}.log"


def test_a_link_or_file_of_another_user_in_place_of_the_log_is_left_alone(prefix, tmp_path):
    (tmp_path / "other").write_text("of someone else")
    os.symlink(tmp_path / "other", f"{prefix}.log")
    log = written(prefix, b"a line\n")
    assert log.read(0, 100) == (b"", 0)
    assert (tmp_path / "other").read_text() == "of someone else"


def test_a_closed_log_has_no_lines(prefix):
    log = written(prefix, b"a line\n")
    log.close()
    assert log.read(0, 100) == (b"", 0)
