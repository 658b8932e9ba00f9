"""Damaged parts, and a pipeline for tests of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
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


# A pipeline whose files are damaged

ROWS = 30


def double(batch: pa.Table) -> pa.Table:
    return pa.table({"y": [2 * x for x in batch["x"].to_pylist()]})


def negate(batch: pa.Table) -> pa.Table:
    return pa.table({"z": [-y for y in batch["y"].to_pylist()]})


def make(tmp_path: Path) -> vd.Pipeline:
    """source -> clean -> double -> negate, three fragments of ten rows."""
    docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=10)
    clean = docs.project("clean", ["x", "note"])
    doubled = clean.map_batches("double", double, schema={"y": "BIGINT"})
    doubled.map_batches("negate", negate, schema={"z": "BIGINT"})
    return docs


def rows(ids: range, xs: range | None = None) -> dict[str, Any]:
    """Rows whose text takes most of the file."""
    return {"id": ids, "x": xs or ids, "note": [f"{i:04}" * 50 for i in ids]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    whole = rows(range(ROWS))
    return write_source(tmp_path / "src", whole, row_group_size=10, compression="none")


def edit(tmp_path: Path) -> None:
    write_source(tmp_path / "src", rows(range(ROWS), range(1, ROWS + 1)))


def rows_of(tmp_path: Path, stage: str, column: str) -> list[int]:
    return read_stage(tmp_path / "store", "docs", stage)[column].to_pylist()


def manifests(tmp_path: Path) -> dict[str, bytes]:
    found = (tmp_path / "store").rglob("manifests/*/*.json")
    return {str(path): path.read_bytes() for path in found}
