"""A location resolves its file system once in each thread, and stays a plain value."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import replace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from vane_dagster.storage.filesystem import Location


class Counted(LocalFileSystem):
    """Counts how often an instance is asked for."""

    protocol = "counted"
    cachable = False
    made = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        type(self).made += 1


@pytest.fixture
def counted() -> type[Counted]:
    fsspec.register_implementation("counted", Counted, clobber=True)
    Counted.made = 0
    return Counted


def test_each_thread_has_its_own_file_system(counted):
    """Not every driver of fsspec may be used by two threads."""
    folder = Location("counted:///x")
    found = {id(folder.fs)}
    kept = []

    def look() -> None:
        kept.append(folder.fs)
        found.update((id(folder.fs), id(folder.fs)))

    for thread in [threading.Thread(target=look) for _ in range(3)]:
        thread.start()
        thread.join()
    assert counted.made == len(found) == 4


def test_a_resolved_location_is_the_same_value(tmp_path):
    fresh, used = (Location(str(tmp_path), {"auto_mkdir": True}) for _ in range(2))
    assert used.path == str(tmp_path)
    assert used == fresh
    assert repr(used) == repr(fresh)
    for same in (pickle.loads(pickle.dumps(used)), copy.deepcopy(used), replace(used)):
        assert same == fresh
        assert same.storage_options == {"auto_mkdir": True}
        assert (same.path, same.fs.auto_mkdir) == (str(tmp_path), True)
    assert len(pickle.dumps(used)) == len(pickle.dumps(fresh))


def test_a_relative_location_follows_the_working_folder(tmp_path, monkeypatch):
    folder = Location("data")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert folder.path == str(tmp_path / name / "data")
