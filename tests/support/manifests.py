"""Parts and manifests as a run would write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import (
    FileRecord,
    FragmentRecord,
    Manifest,
    PartInfo,
)
from vane_dagster.storage.part_file import PartTarget, write_part


def part(
    folder: StoragePath, ids: Sequence[Any] = (1,), key: str = "a" * 40, **given: Any
) -> PartInfo:
    return write_part(pa.table({"id": ids}), PartTarget(folder, key, "id", **given))


def manifest(
    parts: Sequence[PartInfo] = (), partition: str | None = "p", stage: str = "s", plan: str = "0"
) -> Manifest:
    return Manifest(
        pipeline="docs",
        stage=stage,
        partition=partition,
        generation="0",
        plan=plan * 32,
        definition="d",
        schema=pa.schema([("id", pa.int64())]),
        fragments=[
            FragmentRecord(f"file:///f{i}", 0, info.rows, "f", 10) for i, info in enumerate(parts)
        ],
        parts=list(parts),
        files=[FileRecord("file:///f0", 10, "1")],
        upstream={"above": "name"},
        run_id="run",
        committed_at=1.5,
        info={"versions": {"python": "3"}},
    )
