"""What the executor says about the local files that it copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vane_dagster.engine import executor
from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.local_file import local_file


@pytest.mark.parametrize("change", ["edited", "edited while it is copied", "gone"])
def test_a_local_file_that_changed_since_the_plan_is_a_problem(
    tmp_path, store, change, monkeypatch
):
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
