"""Manifests: the one commit record of a stage in a partition, and the parts that it names."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

_NAME = re.compile(r"(\d{8,})-g(\d+)-([0-9a-f]{32})-([0-9a-f]{16})\.json")
_PART = re.compile(r"([0-9a-f]{40})-([0-9a-f]{16})\.parquet")


@dataclass(frozen=True)
class PartInfo:
    """One part: a stage's output for one fragment.

    Attributes:
        key: The fragment key.
        digest: Digest of the file's bytes.
        rows: Rows in it.
        bytes: Its size in the store.
        id_min: Smallest id, None without rows.
        id_max: Largest id, None without rows.
    """

    key: str
    digest: str
    rows: int
    bytes: int
    id_min: Any = None
    id_max: Any = None

    @property
    def name(self) -> str:
        """The part's file name."""
        return part_name(self.key, self.digest)


def part_name(key: str, digest: str) -> str:
    """File name of a part."""
    return f"{key}-{digest}.parquet"


def parse_part_name(name: str) -> tuple[str, str] | None:
    """Fragment key and digest of a part's file name; None for another file."""
    match = _PART.fullmatch(name)
    return (match.group(1), match.group(2)) if match else None


@dataclass(frozen=True)
class FragmentRecord:
    """A fragment as a manifest records it: rows `start` to `stop` of a source file."""

    url: str
    start: int
    stop: int
    identity: str
    bytes: int


@dataclass(frozen=True)
class FileRecord:
    """A source file as a manifest records it."""

    url: str
    size: int
    version: str
    content: str | None = None


@dataclass(frozen=True)
class ManifestName:
    """What a manifest's file name tells without opening it.

    Attributes:
        sequence: Count of commits of the stage in the partition; the largest is in force.
        generation: Raised by a forced run.
        plan: Digest of what the partition was computed from.
        content: Digest of what it consists of.
        unfinished: Whether a publication was begun and not ended beside it; not part of the name.
    """

    sequence: int
    generation: int
    plan: str
    content: str
    unfinished: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.sequence:08d}-g{self.generation}-{self.plan}-{self.content}.json"

    @classmethod
    def parse(cls, name: str) -> ManifestName | None:
        """The name's fields; None for another file."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(int(match.group(1)), int(match.group(2)), match.group(3), match.group(4))


@dataclass(frozen=True)
class Manifest:
    """The commit record of a stage in a partition.

    Attributes:
        pipeline: The pipeline's name.
        stage: The stage's name.
        partition: The partition's key, None for an unpartitioned pipeline.
        generation: Raised by a forced run.
        plan: Digest of what the partition was computed from.
        definition: The stage's definition, which is its code version.
        schema: The rows' schema.
        fragments: The fragments, in the order of the source.
        parts: A part for each fragment, in the same order.
        files: The source files.
        upstream: Manifest names of the upstream stages, by stage.
        run_id: The run that committed it.
        committed_at: Unix time in seconds.
        info: What else is worth keeping: versions, counts.
    """

    pipeline: str
    stage: str
    partition: str | None
    generation: int
    plan: str
    definition: str
    schema: pa.Schema
    fragments: Sequence[FragmentRecord]
    parts: Sequence[PartInfo]
    files: Sequence[FileRecord]
    upstream: Mapping[str, str]
    run_id: str
    committed_at: float
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of the partition."""
        return sum(part.rows for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes of the partition in the store."""
        return sum(part.bytes for part in self.parts)

    @property
    def content(self) -> str:
        """Digest of the parts: the same rows from the same computation have the same."""
        return content_digest(self.parts)

    def dumps(self) -> bytes:
        """The manifest as JSON."""
        record = {
            **{name: getattr(self, name) for name in _PLAIN},
            "schema": base64.b64encode(self.schema.serialize().to_pybytes()).decode(),
            "fragments": [asdict(f) for f in self.fragments],
            "parts": [asdict(p) for p in self.parts],
            "files": [asdict(f) for f in self.files],
            "format": 1,
        }
        return json.dumps(record).encode()

    @classmethod
    def loads(cls, data: bytes) -> Manifest:
        """Reads what `dumps` wrote."""
        record = json.loads(data)
        return cls(
            **{name: record[name] for name in _PLAIN},
            schema=pa.ipc.read_schema(pa.py_buffer(base64.b64decode(record["schema"]))),
            fragments=[FragmentRecord(**f) for f in record["fragments"]],
            parts=[PartInfo(**p) for p in record["parts"]],
            files=[FileRecord(**f) for f in record["files"]],
        )


_PLAIN = (
    "pipeline",
    "stage",
    "partition",
    "generation",
    "plan",
    "definition",
    "upstream",
    "run_id",
    "committed_at",
    "info",
)


def content_digest(parts: Sequence[PartInfo]) -> str:
    """Digest of what a partition consists of; 16 hex digits."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(f"{part.key}-{part.digest}\n".encode())
    return state.hexdigest()
