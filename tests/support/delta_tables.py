"""Delta tables with what deltalake does not write: deletion vectors, and other features."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from deltalake import DeltaTable

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_MAGIC = 1681511377


def commit(table: Path, actions: Iterable[Mapping[str, Any]]) -> int:
    version = DeltaTable(str(table)).version() + 1
    lines = "\n".join(json.dumps(action) for action in actions)
    (table / "_delta_log" / f"{version:020d}.json").write_text(lines)
    return version


def log_actions(table: Path, kind: str) -> list[dict[str, Any]]:
    files = sorted((table / "_delta_log").glob("*.json"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line[kind] for line in lines if kind in line]


def use_features(table: Path, *features: str, **configuration: str) -> int:
    """Turn features of the reader on, with options of the table."""
    metadata = log_actions(table, "metaData")[-1]
    known = {"minReaderVersion": 3, "minWriterVersion": 7}
    protocol = {**known, "readerFeatures": features, "writerFeatures": features}
    changed = {**metadata, "configuration": {**metadata["configuration"], **configuration}}
    return commit(table, [{"protocol": protocol}, {"metaData": changed}])


def delete_positions(table: Path, path: str, positions: Iterable[int]) -> int:
    """Delete rows of a data file by a deletion vector, as Spark does."""
    rows = sorted(positions)
    data = _bitmap(rows)
    name = uuid4()
    framed = struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    (table / f"deletion_vector_{name}.bin").write_bytes(b"\x01" + framed)
    place = {"storageType": "u", "pathOrInlineDv": _z85(name.bytes), "offset": 1}
    add = next(a for a in reversed(log_actions(table, "add")) if a["path"] == path)
    removed = {k: add[k] for k in ("path", "partitionValues", "size", "deletionVector") if k in add}
    vector = {**place, "sizeInBytes": len(data), "cardinality": len(rows)}
    actions = [
        {"remove": {**removed, "deletionTimestamp": 1, "dataChange": True}},
        {"add": {**add, "deletionVector": vector}},
    ]
    if "deletionVectors" not in (DeltaTable(str(table)).protocol().reader_features or ()):
        use_features(table, "deletionVectors", **{"delta.enableDeletionVectors": "true"})
    return commit(table, actions)


def _bitmap(rows: list[int]) -> bytes:
    """Return a 64-bit Roaring bitmap of array containers, in Delta's portable form."""
    containers: dict[int, list[int]] = {}
    for row in rows:
        containers.setdefault(row >> 16, []).append(row & 0xFFFF)
    keys = [struct.pack("<HH", key, len(low) - 1) for key, low in containers.items()]
    bodies = [struct.pack(f"<{len(low)}H", *low) for low in containers.values()]
    start = 8 + 8 * len(containers)
    offsets = [start + sum(map(len, bodies[:i])) for i in range(len(bodies))]
    head = struct.pack("<II", 12346, len(containers))
    index = struct.pack(f"<{len(offsets)}I", *offsets)
    bitmap = b"".join([head, *keys, index, *bodies])
    return struct.pack("<IQI", _MAGIC, 1, 0) + bitmap


def _z85(data: bytes) -> str:
    text = ""
    for start in range(0, len(data), 4):
        value, word = int.from_bytes(data[start : start + 4], "big"), ""
        for _ in range(5):
            value, digit = divmod(value, 85)
            word = _Z85[digit] + word
        text += word
    return text
