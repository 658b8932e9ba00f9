"""When a local head stops by itself, with heads of records alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import vane_dagster as vd
from support.heads import HEAD
from vane_dagster.compute import idle_watcher
from vane_dagster.compute.idle_watcher import CHECK_SECONDS, pause, stop_if_idle
from vane_dagster.compute.local_head import HeadFolder

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
