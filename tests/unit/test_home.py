"""The state folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from vane_dagster.compute.local_head import LocalHead


def test_home_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VANE_DAGSTER_HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert LocalHead().folder.parent == tmp_path / ".local/state/vane_dagster"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert LocalHead().folder.parent == tmp_path / "state/vane_dagster"
    monkeypatch.setenv("VANE_DAGSTER_HOME", str(tmp_path / "own"))
    assert LocalHead().folder.parent == tmp_path / "own"
    assert LocalHead(home=tmp_path / "given").folder.parent == tmp_path / "given"
