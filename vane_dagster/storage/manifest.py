"""Manifests: the commit record of a stage in a partition, and the parts that it names."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from vane_dagster.storage.codec import FORMAT, STORE_FORMAT, UNRECORDED, Codec, require_format
from vane_dagster.storage.filesystem import StoragePath

_NAME = re.compile(r"(\d{8,})-g(\d+(?:\.[0-9a-f]{8})?)-([0-9a-f]{32})-([0-9a-f]{16})\.json")
_PART = re.compile(r"([0-9a-f]{40})-([0-9a-f]{16})\.parquet")


@dataclass(frozen=True)
class PartProvenance:
    """The origin of a part: the run and the workers that made it.

    Attributes:
        run_id: The run.
        workers: Names of the workers that computed its rows.
        at: Unix time in seconds at which it was written.
        seconds: Seconds that all workers took together.
        packages: The installed packages that the user's code imports, each "name==version" on the
            workers; one package in several versions if workers differed.
        definition: The definition that computed it, of those that count as the manifest's; empty in
            parts of earlier releases.
    """

    run_id: str
    workers: tuple[str, ...]
    at: float
    seconds: float
    packages: tuple[str, ...] = ()
    definition: str = ""


@dataclass(frozen=True)
class PartInfo:
    """One part: a stage's output for one fragment.

    Attributes:
        key: The fragment key.
        digest: Digest of the rows as they are stored.
        rows: Number of rows.
        bytes: Its size in the store.
        id_min: Smallest id, None without rows.
        id_max: Largest id, None without rows.
        rows_in: Input rows.
        filtered: Input rows without output, as the stage declares.
        quarantined: Input rows without output, because of errors.
        nulled: Input rows with nulls as output, because of errors.
        faults: Name of the file beside it with the records of these errors; empty without any.
        made: Which run made it, on which workers, when, and how long it took.
        measures: Statistics of its columns for checks, by column and measure.
        sample: Some rows as texts, of a part just written.
        row_records: Name of the file beside it with its row records; empty without any.
        copied: Input rows with the outcome of an equal row, of the same part or an earlier one.
        inherited: Sums among `measures` that are those of copied rows.
        unread: Of the quarantined and nulled rows, those that the source could not read.
        input_id: Name of the column with the ids of its input; empty in parts of earlier releases.
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
    made: PartProvenance | None = None
    measures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sample: Sequence[Mapping[str, str]] = field(default=(), compare=False, metadata=UNRECORDED)
    row_records: str = ""
    copied: int = 0
    inherited: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unread: int = 0
    input_id: str = ""

    @property
    def name(self) -> str:
        """The part's file name."""
        return part_name(self.key, self.digest)

    @property
    def stem(self) -> str:
        """The part's file name without its suffix."""
        return f"{self.key}-{self.digest}"

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its files, in the order in which they are written: itself last."""
        return (*filter(None, (self.faults, self.row_records)), self.name)

    @property
    def spent(self) -> dict[str, dict[str, float]]:
        """The sums among its measures without what other parts had already."""
        return {
            column: {name: self.measures[column][name] - value for name, value in sums.items()}
            for column, sums in self.inherited.items()
        } | {name: dict(sums) for name, sums in self.measures.items() if name not in self.inherited}


def part_name(key: str, digest: str) -> str:
    """Return the file name of a part."""
    return f"{key}-{digest}.parquet"


def parse_part_name(name: str) -> tuple[str, str] | None:
    """Return fragment key and digest of a part's file name; None for another file."""
    match = _PART.fullmatch(name)
    return (match.group(1), match.group(2)) if match else None


def part_footer(part: PartInfo) -> str:
    """Return the text that describes a part in its footer."""
    return json.dumps({"part": _PART_CODEC.record(part), "sample": part.sample})


def read_part_footer(text: bytes, file: str, **known: Any) -> PartInfo:
    """Read a text that `part_footer` wrote."""
    record = json.loads(text)
    require_format(record, file)
    return _PART_CODEC.load(record["part"], sample=record["sample"], **known)


@dataclass(frozen=True)
class FileSpan:
    """Rows `start` to `stop` of a source file.

    Attributes:
        url: The file.
        start: First row.
        stop: The row after the last.
        detail: What the source needs to read these rows, in its own terms, such as a byte range.
    """

    url: str
    start: int
    stop: int
    detail: str = ""

    def __str__(self) -> str:
        return f"rows {self.start} to {self.stop} of {self.url}"


@dataclass(frozen=True)
class FragmentRecord:
    """A fragment as a manifest records it: rows of one source file, or of several.

    Attributes:
        url: The file; the first of several.
        start: First row in the file; 0 for several files.
        stop: The row after the last; the number of rows for several files.
        identity: Digest of the rows' files, their versions and ranges.
        bytes: Estimated bytes of the rows in memory.
        files: The rows of several files, in order; empty for one.
        detail: What the source needs to read the rows of one file; see `FileSpan`.
    """

    url: str
    start: int
    stop: int
    identity: str
    bytes: int
    files: Sequence[FileSpan] = ()
    detail: str = ""

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return self.stop - self.start

    @property
    def spans(self) -> Sequence[FileSpan]:
        """The rows of each file, in order."""
        return self.files or (FileSpan(self.url, self.start, self.stop, self.detail),)

    def __str__(self) -> str:
        if not self.files:
            return str(self.spans[0])
        first, last = self.files[0].url, self.files[-1].url
        return f"{self.stop} rows of {len(self.files)} files, {first} to {last}"


@dataclass(frozen=True)
class FileRecord:
    """A source file as a manifest records it.

    Attributes:
        url: The file.
        size: Its size in bytes.
        version: Its version, which changes when the file does.
        content: Digest of its bytes, if it was computed.
        modified: Unix time of its last change in seconds, if it was listed; not recorded.
    """

    url: str
    size: int
    version: str
    content: str | None = None
    modified: float | None = field(default=None, compare=False, metadata=UNRECORDED)


FIRST_GENERATION = "0"


def raised(generation: str, run_id: str | None, again: bool = True) -> str:
    """Return the generation that follows one, for what a run computes again.

    It is a number and a mark of the run, so that no other run has parts with the same keys. A
    second attempt of the run gets the same one. `run_id` may also be a manifest and the number of
    an attempt. If `again`, the number is raised too: rows in force are computed again.
    """
    number, _, mark = generation.partition(".")
    own = hashlib.blake2b(str(run_id).encode(), digest_size=4).hexdigest()
    return generation if mark == own else f"{int(number) + again}.{own}"


def generation_number(generation: str) -> int:
    """Return how many runs have computed rows again that were in force."""
    return int(generation.partition(".")[0])


@dataclass(frozen=True)
class ManifestName:
    """The fields of a manifest's file name, known without opening it.

    Attributes:
        sequence: Count of commits of the stage in the partition; the largest is in force.
        generation: Names the last run that computed rows again; see `raised`.
        plan: Digest of everything that the partition was computed from.
        content: Digest of the parts.
        unfinished: Whether a publication beside it has begun and not ended; not part of the name.
    """

    sequence: int
    generation: str
    plan: str
    content: str
    unfinished: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.sequence:08d}-g{self.generation}-{self.plan}-{self.content}.json"

    @property
    def version(self) -> tuple[str, str, str]:
        """What commits of the same rows from the same computation have in common."""
        return self.generation, self.plan, self.content

    @classmethod
    def parse(cls, name: str) -> ManifestName | None:
        """Parse a file name; return None for another file."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(int(match[1]), match[2], match[3], match[4])


@dataclass(frozen=True)
class CheckResult:
    """The result of a check of a stage in a partition.

    Attributes:
        name: The check's name.
        passed: Whether it passed.
        blocking: Whether a failure withholds the stages downstream.
        severity: "ERROR" or "WARN", of a check that did not pass.
        description: The result, in a sentence.
        metadata: The numbers.
        definition: Digest of the check's own thresholds, to detect changes of them.
    """

    name: str
    passed: bool
    blocking: bool
    severity: str
    description: str
    metadata: Mapping[str, Any]
    definition: str

    @property
    def blocks(self) -> bool:
        """Whether it withholds the stages downstream."""
        return self.blocking and not self.passed


class Component(NamedTuple):
    """One of the things that a stage's definition consists of.

    Attributes:
        kind: What it is, for people, as in "code" or "argument".
        name: Its name, for people. Not part of the digest.
        digest: Digest of its value.
    """

    kind: str
    name: str
    digest: str

    def __str__(self) -> str:
        return f"code of {self.name}" if self.kind == "code" else f"{self.kind} {self.name!r}"


@dataclass(frozen=True)
class Published:
    """The files that a `write` stage has published for a partition.

    Attributes:
        url: The folder, or the table.
        files: Names of the files in it, relative to `url`.
        format: "parquet", or the name of a table's format, such as "delta".
        version: The table's version or snapshot, for formats that have one.
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
        generation: Names the last run that computed rows again; see `raised`.
        plan: Digest of everything that the partition was computed from.
        definition: The stage's definition, which is its code version.
        schema: The rows' schema.
        fragments: The fragments, in the order of the source.
        parts: A part for each fragment, in the same order.
        files: The source files.
        upstream: Manifest names of the upstream stages, by stage.
        run_id: The run that committed it.
        committed_at: Unix time in seconds.
        info: Further information, such as whether the stage makes several rows from one.
        kind: The stage's kind, such as "map_batches".
        keys: The columns that identify a row: its id, then the ids of the rows it came from.
        reads: The inputs of the stage: "source", or names of stages.
        model: The user's class or function, and the pool that ran it; empty without one.
        lineage: For each column the columns that it came from, in pairs [stage, column].
        checks: The results of the stage's checks.
        sample: Some rows as texts, for people.
        published: Where a `write` stage has published the rows.
        source: Kind of the source that the fragments come from; empty for Parquet files.
        id_rule: How the source's ids were computed; empty if they are a column of the source.
        row_definition: What determines the stage's output for a row with given values; empty if
            its rows have no keys.
        components: What the definition consists of.
        figures: What the run that committed it took to compute it, as metadata in Dagster; empty
            in manifests of earlier releases.
        branched_from: Of a branch, the name of the fallback's manifest that it replaces: the one
            that was in force when the branch first computed the partition, or that was promoted
            from the branch since. Empty if there was none, or in no branch.
        root: The root of the store that it was read from; not recorded.
        undone: The names of the stage's adoptions that were undone by then, so that none of its
            rows are there because of them.
        generations: Its own generation, and earlier ones that keys of its parts may be made of.
        row_floor: Rows of an earlier epoch are not copied into it; see `storage.row_floor`. None
            stands for the epoch of the stage, as in manifests of earlier releases.
    """

    pipeline: str
    stage: str
    partition: str | None
    generation: str
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
    source: str = ""
    id_rule: str = ""
    row_definition: str = ""
    components: Sequence[Component] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    branched_from: str = ""
    root: StoragePath | None = field(default=None, repr=False, compare=False, metadata=UNRECORDED)
    undone: Sequence[str] = ()
    generations: Sequence[str] = ()
    row_floor: int | None = None

    @property
    def rows(self) -> int:
        """Rows of the partition."""
        return sum(part.rows for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes of the partition in the store."""
        return sum(part.bytes for part in self.parts)

    @property
    def input_key(self) -> int:
        """Position among `keys` of the id of the stage's input."""
        return 1 if self.info.get("children") else 0

    @property
    def published_files(self) -> Sequence[str]:
        """The files that a `write` stage has in its target."""
        return self.published.files if self.published else ()

    @property
    def content(self) -> str:
        """Digest of the parts, equal for the same rows from the same computation."""
        return content_digest(self.parts)

    def dumps(self) -> bytes:
        """Convert the manifest to JSON."""
        return json.dumps({**MANIFEST.record(self), FORMAT: STORE_FORMAT}).encode()


_PART_CODEC = Codec(PartInfo)
MANIFEST = Codec(Manifest)


def content_digest(parts: Sequence[PartInfo]) -> str:
    """Return a digest of the parts of a partition, as 16 hex digits."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(f"{part.key}-{part.digest}\n".encode())
    return state.hexdigest()
