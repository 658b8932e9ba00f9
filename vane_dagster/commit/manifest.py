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
class Made:
    """Who made a part.

    Attributes:
        run_id: The run.
        workers: Names of the workers that computed its rows.
        at: Unix time in seconds at which it was written.
        seconds: What the workers took, all together.
        packages: The installed packages that the user's code imports, as "name==version" on the
            workers; one in several versions if workers differed.
    """

    run_id: str
    workers: tuple[str, ...]
    at: float
    seconds: float
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartInfo:
    """One part: a stage's output for one fragment.

    Attributes:
        key: The fragment key.
        digest: Digest of the rows as they are stored.
        rows: Rows in it.
        bytes: Its size in the store.
        id_min: Smallest id, None without rows.
        id_max: Largest id, None without rows.
        rows_in: Rows that it was made from.
        filtered: Of which nothing came out, as the stage declares.
        quarantined: Of which nothing came out, because of errors.
        nulled: Rows that came out as nulls, because of errors.
        faults: Name of the file beside it that tells of these errors; empty without any.
        made: Which run made it, on which workers, when, and how long it took.
        measures: What was counted of its columns, for checks: by column and measure.
        sample: Some rows as texts, of a part just written.
    """

    key: str
    digest: str
    rows: int
    bytes: int
    id_min: Any = None
    id_max: Any = None
    rows_in: int = 0
    filtered: int = 0
    quarantined: int = 0
    nulled: int = 0
    faults: str = ""
    made: Made | None = None
    measures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sample: Sequence[Mapping[str, str]] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """The part's file name."""
        return part_name(self.key, self.digest)

    def as_record(self) -> dict[str, Any]:
        """The fields as JSON holds them, without those that have their default."""
        record = {name: getattr(self, name) for name in _PART_FIELDS}
        record = {name: value for name, value in record.items() if value}
        if self.made:
            made = asdict(self.made)
            record["made"] = {k: v for k, v in made.items() if v or k != "packages"}
        return {"rows": 0, "id_min": self.id_min, "id_max": self.id_max, **record}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PartInfo:
        """Reads what `as_record` wrote."""
        made = record.get("made")
        if made:
            packages = tuple(made.get("packages", ()))
            made = Made(**{**made, "workers": tuple(made["workers"]), "packages": packages})
        return cls(**{**record, "made": made})


def part_name(key: str, digest: str) -> str:
    """File name of a part."""
    return f"{key}-{digest}.parquet"


def parse_part_name(name: str) -> tuple[str, str] | None:
    """Fragment key and digest of a part's file name; None for another file."""
    match = _PART.fullmatch(name)
    return (match.group(1), match.group(2)) if match else None


_PART_FIELDS = tuple(set(PartInfo.__dataclass_fields__) - {"made", "sample"})


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
class CheckResult:
    """What a check of a stage found in a partition.

    Attributes:
        name: The check's name.
        passed: Whether it passed.
        blocking: Whether what lies below is withheld where it did not.
        severity: "ERROR" or "WARN", of a check that did not pass.
        description: What was found, in a sentence.
        metadata: The numbers.
        definition: Digest of the check's own thresholds, by which a change of them is seen.
    """

    name: str
    passed: bool
    blocking: bool
    severity: str
    description: str
    metadata: Mapping[str, Any]
    definition: str


@dataclass(frozen=True)
class Published:
    """Where a `write` stage has put a partition.

    Attributes:
        url: The folder, or the table.
        files: Names of the files in it, relative to `url`.
        format: "parquet" or "delta".
        version: The table's version, for formats that have one.
    """

    url: str
    files: Sequence[str]
    format: str = "parquet"
    version: int | None = None


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
        kind: The stage's kind, as "map_batches".
        keys: The columns that identify a row: its id, then the ids of the rows it came from.
        reads: What the stage reads: "source", or names of stages.
        model: The user's class or function, and the pool that ran it; empty without one.
        lineage: For each column the columns that it came from, as [node, column] pairs.
        checks: What the stage's checks found.
        sample: Some rows as texts, for people.
        published: Where a `write` stage has put the rows.
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
    kind: str = ""
    keys: Sequence[str] = ()
    reads: Sequence[str] = ()
    model: Mapping[str, str] = field(default_factory=dict)
    lineage: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    checks: Sequence[CheckResult] = ()
    sample: Sequence[Mapping[str, str]] = ()
    published: Published | None = None

    @property
    def rows(self) -> int:
        """Rows of the partition."""
        return sum(part.rows for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes of the partition in the store."""
        return sum(part.bytes for part in self.parts)

    @property
    def published_files(self) -> Sequence[str]:
        """The files that a `write` stage has in its target."""
        if self.published is None:
            return [part.name for part in self.parts]
        return self.published.files

    @property
    def content(self) -> str:
        """Digest of the parts: the same rows from the same computation have the same."""
        return content_digest(self.parts)

    def dumps(self) -> bytes:
        """The manifest as JSON."""
        record = {
            **{name: getattr(self, name) for name in (*_PLAIN, "keys", "reads", "sample")},
            "schema": base64.b64encode(self.schema.serialize().to_pybytes()).decode(),
            "fragments": [asdict(f) for f in self.fragments],
            "parts": [p.as_record() for p in self.parts],
            "files": [asdict(f) for f in self.files],
            "checks": [asdict(c) for c in self.checks],
            "published": self.published and asdict(self.published),
            "format": 2,
        }
        return json.dumps(record).encode()

    @classmethod
    def loads(cls, data: bytes) -> Manifest:
        """Reads what `dumps` wrote."""
        record = json.loads(data)
        return cls(
            **{name: record[name] for name in _PLAIN if name in record},
            keys=tuple(record.get("keys", ())),
            reads=tuple(record.get("reads", ())),
            sample=tuple(record.get("sample", ())),
            schema=pa.ipc.read_schema(pa.py_buffer(base64.b64decode(record["schema"]))),
            fragments=[FragmentRecord(**f) for f in record["fragments"]],
            parts=[PartInfo.from_record(p) for p in record["parts"]],
            files=[FileRecord(**f) for f in record["files"]],
            checks=tuple(CheckResult(**c) for c in record.get("checks", ())),
            published=Published(**found) if (found := record.get("published")) else None,
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
    "kind",
    "model",
    "lineage",
)


def content_digest(parts: Sequence[PartInfo]) -> str:
    """Digest of what a partition consists of; 16 hex digits."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(f"{part.key}-{part.digest}\n".encode())
    return state.hexdigest()
