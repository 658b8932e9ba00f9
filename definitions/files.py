"""Writes Parquet files that readers never see unfinished."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def write_parquet(table: pa.Table, target: Path) -> bytes:
    """Put a file in place completely or not at all, and return its content."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    written: bytes = sink.getvalue().to_pybytes()
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{secrets.token_hex(8)}")
    unfinished.write_bytes(written)
    os.replace(unfinished, target)
    return written
