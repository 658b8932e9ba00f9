"""The floor of a stage's row records."""

from __future__ import annotations

import pytest

import vane_dagster as vd
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.row_floor import raise_floor, read_floor
from vane_dagster.storage.store import Store


@pytest.fixture
def store(tmp_path):
    return Store(Location(str(tmp_path)))


def test_each_forced_run_raises_the_floor_of_its_stage_once(store):
    assert read_floor(store, "docs", "embed") == 0
    first = raise_floor(store, "docs", "embed", "first")
    assert first > 0
    assert raise_floor(store, "docs", "embed", "first") == first, "a second attempt"
    second = raise_floor(store, "docs", "embed", "second")
    assert second > first, "within a second, or if the clock was put back"
    assert (read_floor(store, "docs", "embed"), read_floor(store, "docs", "label")) == (second, 0)


def test_the_floor_after_a_lost_file_is_above_those_before(store, tmp_path, monkeypatch):
    now = iter([1_000, 1_000, 1_060])
    monkeypatch.setattr("time.time", lambda: next(now))
    floors = [raise_floor(store, "docs", "embed", run) for run in ("first", "second")]
    (tmp_path / "docs/embed/row_floor.json").unlink()
    assert raise_floor(store, "docs", "embed", "third") > max(floors)


def test_a_floor_that_cannot_be_read_is_an_error(store, tmp_path):
    raise_floor(store, "docs", "embed", "first")
    (tmp_path / "docs/embed/row_floor.json").write_text("{")
    with pytest.raises(vd.errors.StoreError, match=r"row_floor\.json' is not readable"):
        read_floor(store, "docs", "embed")
