"""Damaged parts."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from vane_dagster import retries
from vane_dagster.storage.manifest import parse_part_name


def parts(tmp_path: Path, stage: str) -> list[Path]:
    return stored_parts(tmp_path / "store/docs" / stage / "parts")


def stored_parts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.parquet") if parse_part_name(path.name))


def flip(file: Path, column: str = "y") -> None:
    """Flip a bit at the end of a column's data, which could then be other numbers."""
    chunk = pq.read_metadata(file).row_group(0)
    names = [chunk.column(i).path_in_schema for i in range(chunk.num_columns)]
    found = chunk.column(names.index(column))
    start = found.dictionary_page_offset or found.data_page_offset
    data = bytearray(file.read_bytes())
    data[start + found.total_compressed_size - 3] ^= 0x10
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def blank(file: Path) -> None:
    file.write_bytes(b"")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "STORAGE", retries.Backoff(0.01, 0.01))
