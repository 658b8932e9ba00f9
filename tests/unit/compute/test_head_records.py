"""The records, starts, processes and idle time of local heads that do not exist."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
from collections import namedtuple
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

import vane_dagster as vd
from support.heads import HEAD, accepting, free_port
from vane_dagster.compute import idle_watcher, local_head, processes
from vane_dagster.compute.idle_watcher import CHECK_SECONDS, pause, stop_if_idle
from vane_dagster.compute.local_head import Head, HeadFolder, LocalHead
from vane_dagster.errors import ComputeError


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[Head]:
    """The record of a head that accepts connections, in the place of the default head."""
    with accepting() as head:
        head = dataclasses.replace(head, settings=("--num-cpus=2",))
        record(head, tmp_path)
        yield head


def record(head: Any, home: Path) -> None:
    folder = LocalHead(home=home).folder
    folder.mkdir(mode=0o700, exist_ok=True)
    text = head if isinstance(head, str) else json.dumps(dataclasses.asdict(head))
    (folder / "head.json").write_text(text)


def test_a_head_is_alive_while_both_of_its_processes_accept_connections(alive, tmp_path):
    """What cannot be read is not a head."""
    local = LocalHead(home=tmp_path)
    assert local.find() == alive
    for gone in ({"address": f"127.0.0.1:{free_port()}"}, {"session_dir": str(tmp_path)}):
        record(dataclasses.replace(alive, **gone), tmp_path)
        assert local.find() is None
    for text in ("{", "[]", "{}", '{"settings": [], "unknown": 1}'):
        record(text, tmp_path)
        assert local.find() is None


def test_a_head_that_lives_is_used_if_it_has_what_is_asked_for(alive, tmp_path):
    for settings in ({}, {"num_cpus": 2}):
        assert LocalHead(home=tmp_path, **settings).ensure() == alive
    with pytest.raises(
        ComputeError, match=r"already runs with --num-cpus=2.* asks for --num-cpus=7"
    ):
        LocalHead(num_cpus=7, home=tmp_path).ensure()


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_state_folder_that_cannot_be_used_names_the_setting(
    has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be created; and its file system has no locks."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if has_locks:
        (tmp_path / "file").touch()
        local = LocalHead(home=tmp_path / "file" / "state")
        expected = rf"state folder {local.folder} .* cannot be used: .*"
    else:
        local = LocalHead(home=tmp_path)
        local.folder.mkdir()
        monkeypatch.setattr("fcntl.flock", no_locks)
        expected = rf"{local.folder}/\w+ cannot be locked: No locks available. "
    for use in (local.connect, local.ensure, *([] if has_locks else [local.stop])):
        with pytest.raises(ComputeError, match=f"{expected}Set VANE_DAGSTER_HOME to"):
            use()


@pytest.mark.parametrize(
    ("ends", "printed", "words"),
    [
        (1, "Traceback\nValueError: `CPU` is wrong", "1. Ray says: ValueError: `CPU` is wrong ("),
        (None, "", "not ready after 60 s. Ray says: nothing (asked for: --num-cpus=3; whole log"),
        (0, "192.0.2.1:6379", "expected 127.0.0.1: it was ended at once. Ray "),
        (0, "127.0.0.1:6379", "died right after its start. Ray's logs: "),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(
    ends: int | None, printed: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that listens elsewhere than on the loopback address fails too."""
    local = LocalHead(home=tmp_path, num_cpus=3)

    def run(command: list[str], timeout: float, **given: Any) -> Any:
        if ends is None:
            raise subprocess.TimeoutExpired(command, timeout)
        given["stdout"].write(printed.encode())
        (local.temp_dir / "r").mkdir()
        (local.temp_dir / "r" / "ray_current_cluster").write_text(printed)
        return SimpleNamespace(returncode=ends)

    ended: list[str] = []
    monkeypatch.setattr(local_head, "end", lambda mark: ended.append(mark) or False)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ComputeError) as caught:
        local.ensure()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ended == [str(local.temp_dir)] * 2, "what was left before, and what was started"
    assert local.read() is None


MARK = "/the/mark"


def listed(pid: int, ppid: int = 1, mark: str | None = None, **given: Any) -> Any:
    info = {
        "ppid": ppid, "name": f"p{pid}", "status": given.get("status", psutil.STATUS_RUNNING),
        "environ": {processes.MARK: mark} if mark else None,
        "uids": SimpleNamespace(real=given.get("uid", os.getuid())),
    }  # fmt: skip
    return Listed(pid=pid, as_dict=lambda attributes: info)


class Listed(SimpleNamespace):
    __hash__ = object.__hash__


def test_processes_of_a_head_are_those_with_its_mark_their_sessions_and_descendants(monkeypatch):
    """Ray's agents overwrite their environment with their title."""
    table = [
        listed(10, mark=MARK), listed(11), listed(12, ppid=11), listed(13, mark="/other"),
        listed(14, mark=MARK, uid=os.getuid() + 1), listed(15, mark=MARK, status="zombie"),
        listed(16, ppid=99), listed(os.getpid(), ppid=10, mark=MARK),
    ]  # fmt: skip
    sessions = {10: 10, 11: 10, 12: 12, 13: 13, 16: 16, os.getpid(): 5}
    monkeypatch.setattr(psutil, "process_iter", lambda: table)
    monkeypatch.setattr(processes, "_session", sessions.get)
    assert processes.marked(MARK) == {10: "p10", 11: "p11", 12: "p12"}


Address = namedtuple("Address", "ip port")


def test_drivers_are_the_processes_with_a_connection_to_the_head(monkeypatch):
    """On macOS, each process has to be asked for its own connections."""

    def connection(port: int, status: str, pid: int | None, ip: str = "127.0.0.1") -> Any:
        return SimpleNamespace(raddr=Address(ip, port), status=status, pid=pid)

    is_open = psutil.CONN_ESTABLISHED
    found = [
        connection(6379, is_open, 7), connection(6379, is_open, None, "::ffff:127.0.0.1"),
        connection(6379, psutil.CONN_TIME_WAIT, 8), connection(6380, is_open, 9),
        connection(6379, is_open, 10), connection(6379, is_open, os.getpid()),
    ]  # fmt: skip
    monkeypatch.setattr(processes, "marked", lambda mark: {10: "worker"})
    monkeypatch.setattr(psutil, "net_connections", lambda kind: found)
    assert processes.drivers(MARK, "127.0.0.1:6379") == {0, 7}

    def denied(kind: str) -> Any:
        raise psutil.AccessDenied

    class Own:
        Connection = namedtuple("Connection", "raddr status")

        def __init__(self, pid: int | None) -> None:
            self.pid = pid

        def net_connections(self, kind: str) -> Any:
            if self.pid is None:
                raise psutil.AccessDenied
            return [Own.Connection(c.raddr, c.status) for c in found if c.pid == self.pid]

    monkeypatch.setattr(psutil, "net_connections", denied)
    monkeypatch.setattr(psutil, "process_iter", lambda: [Own(each.pid) for each in found])
    assert processes.drivers(MARK, "127.0.0.1:6379") == {7}


MINUTE = 60.0


class Watched:
    """The folder of a head that only its record says to run, a clock, and who is connected."""

    def __init__(self, folder: Path, idle_minutes: float | None) -> None:
        folder.mkdir()
        self.place = HeadFolder(folder)
        self.drivers: list[set[int]] = []
        self.now = 1000.0
        (folder / "head.json").write_text(json.dumps(dataclasses.asdict(HEAD)))
        self.set(idle_minutes)

    def set(self, idle_minutes: float | None) -> None:
        text = json.dumps({"idle_minutes": idle_minutes})
        (self.place.folder / "use.json").write_text(text)
        self.place.touch(self.now)

    def connected(self, mark: str, address: str) -> Collection[int]:
        return self.drivers.pop(0) if self.drivers else set()

    def stops_after(self, minutes: float) -> bool:
        self.now += minutes * MINUTE
        with mock.patch.multiple(
            idle_watcher, drivers=self.connected, time=SimpleNamespace(time=lambda: self.now)
        ):
            stopped = stop_if_idle(self.place, HEAD)
        assert stopped == (self.place.read() is None)
        return stopped


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "head", 60)


def test_a_head_stops_after_its_idle_minutes_without_a_driver(watched: Watched) -> None:
    for _ in range(3):
        watched.drivers = [{7}]
        assert not watched.stops_after(500)
    assert not watched.stops_after(59)
    assert watched.stops_after(1)


def test_a_head_that_a_driver_starts_or_finds_is_not_stopped(watched: Watched) -> None:
    with watched.place._flock():
        assert not watched.stops_after(60)
    assert watched.stops_after(0)


def test_the_last_setting_is_in_force(watched: Watched) -> None:
    watched.set(None)
    assert not watched.stops_after(10_000)
    assert pause(watched.place) == CHECK_SECONDS
    watched.set(120)
    assert not watched.stops_after(119)
    watched.set(5)
    assert not watched.stops_after(4)
    assert watched.stops_after(1)


def test_a_head_of_another_start_or_without_a_setting_is_left_alone(watched: Watched) -> None:
    record, setting = watched.place.folder / "head.json", watched.place.folder / "use.json"
    kept = setting.read_text()
    setting.unlink()
    assert not watched.stops_after(1000)
    setting.write_text(kept)
    record.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(HEAD, pid=2))))
    assert not watched.stops_after(1000)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "soon"])
def test_a_wrong_idle_time_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="idle_minutes"):
        vd.LocalCluster(idle_minutes=value)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    ("given", "taken"), [({}, 60), ({"idle_minutes": 0}, None), ({"idle_minutes": None}, None)]
)
def test_none_and_zero_are_never(given: dict[str, None], taken: float | None) -> None:
    assert vd.LocalCluster(**given)._head().idle_minutes == taken
