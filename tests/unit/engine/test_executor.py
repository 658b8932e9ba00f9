"""What the executor says about the local files that it copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vane_dagster.engine import executor
from vane_dagster.events import Noticed
from vane_dagster.fingerprint.local_file import local_file
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store


@pytest.mark.parametrize("size", [10, 1_500_000])
def test_copies_of_local_files_are_announced_if_they_take_time_and_are_no_problem(tmp_path, size):
    (tmp_path / "weights").write_bytes(b"0" * size)
    file = local_file(tmp_path / "weights")
    plan = SimpleNamespace(files={"labels": {file: file.content()}})
    events = []

    assert not executor._ship_files(
        plan, ["labels"], Store(Location(str(tmp_path / "store"))), events.append
    )

    expected = [Noticed(f"copying {file} into the store (1.5 MB)", is_problem=False)]
    assert events == (expected if size > 1_000_000 else [])
