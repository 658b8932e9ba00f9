"""A location resolves its file system once in each thread, and stays a plain value."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

from vane_dagster.storage.filesystem import Location


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
