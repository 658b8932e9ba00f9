"""Fixtures of the worker's unit tests."""

from __future__ import annotations

import pytest

from vane_dagster.retries import Backoff


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry transient errors at once."""
    monkeypatch.setattr("vane_dagster.retries.CALLS", Backoff(0.0, 0.0))
