"""Files with a modification time well in the past."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vane_dagster.fingerprint import hashing

# Kept content

_AGO = 1_700_000_000


def settled(file: Path, content: bytes) -> Path:
    """Write a file with the same modification time as every other one."""
    file.write_bytes(content)
    os.utime(file, (_AGO, _AGO))
    return file


@pytest.fixture
def later(monkeypatch):
    """Set the clock far ahead of every time stamp, so that the files are settled."""
    now = hashing.time.time_ns
    monkeypatch.setattr(hashing.time, "time_ns", lambda: now() + 10**12)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("VANE_DAGSTER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


_SIZE = 1 << 20
