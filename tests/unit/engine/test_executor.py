"""What the executor says about the local files that it copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vane_dagster.engine import executor
from vane_dagster.errors import CodeIdentityError
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


@pytest.mark.parametrize("change", ["edited", "edited while it is copied", "gone"])
def test_a_local_file_that_changed_since_the_plan_is_a_problem(tmp_path, change, monkeypatch):
    """Else the rows would be stored under the key of other weights."""
    path = tmp_path / "weights"
    path.write_text("former")
    file = local_file(path)
    plan: Any = SimpleNamespace(
        pipeline=SimpleNamespace(name="docs"), files={"labels": {file: file.content()}}
    )
    upload = executor.upload

    def uploaded(*given: Any) -> Any:
        path.write_text("edited")
        return upload(*given)

    store = Store(Location(str(tmp_path / "store")))
    if change == "gone":
        path.unlink()
        with pytest.raises(
            CodeIdentityError, match=r"weights'\) cannot be read.*Restore it, or cor"
        ):
            executor._ship_files(plan, ["labels"], store, print)
        return
    if change == "edited":
        path.write_text("edited")
    else:
        monkeypatch.setattr(executor, "upload", uploaded)
    (problem,) = executor._ship_files(plan, ["labels"], store, print)
    assert "weights') was edited while the run began. Run it again" in str(problem)
