"""Arrow files that other processes of a node map into memory."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pyarrow as pa


def write_table(table: pa.Table, folder: str | Path, name: str = "") -> str:
    """Write a table to a file, by default of a new name, and return its path."""
    path = os.path.join(folder, name or f"{uuid.uuid4().hex}.arrow")
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    return path


def read_table(path: str | Path) -> pa.Table:
    """Map the table in a file into memory."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()
