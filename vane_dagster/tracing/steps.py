"""The steps of a trace, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from vane_dagster._texts import Printed

SHOWN = 20
"""Maximum rows per stage that a trace lists; it counts the others."""

_MAX_PUBLISHED = 3


@dataclass(frozen=True)
class RowOrigin:
    """Where the output of a row was computed, if the part has a copy of it.

    Attributes:
        run_id: The run that computed it.
        model: The user's class or function.
        code_version: The stage's definition.
        at: Unix time in seconds at which it was computed.
    """

    run_id: str
    model: str
    code_version: str
    at: float

    def __str__(self) -> str:
        return (
            f"copied: computed by run {self.run_id}, {utc(self.at)}, model {self.model}, "
            f"code {self.code_version}"
        )


@dataclass(frozen=True)
class Step:
    """One row in the source or in a stage's part.

    Attributes:
        stage: Pipeline and stage, such as "docs/clean"; "docs/source" for a row of a source file.
        kind: The stage's kind, such as "map_batches"; "source" for a row of a source file.
        partition: The partition's key.
        keys: By column, the row's id and then the ids of the rows that it was made from.
        values: By column, the row's other values as short texts, without vectors, tensors and
            bytes; of a prompt also its `messages` as declared. Of a source if its object is known.
        url: The part or the source file; empty if unknown.
        row: The row's number in that file, counted from 0; None if unknown.
        reads: The stage's inputs: "source", or names of stages.
        manifest: Name of the manifest that contains the part.
        run_id: The run that made the part.
        committed_by: The run that committed the manifest, perhaps a later one.
        code_version: The definition that computed the part.
        model: The user's class or function.
        pool: Identity of the model's pool.
        workers: The workers that computed the part.
        at: Unix time in seconds at which the part was written.
        seconds: Seconds that the workers spent on the whole part.
        version: The source file's version as the manifest recorded it.
        size: The source file's size in bytes as the manifest recorded it.
        copied_from: Where the row's output was computed, if not for this part, or who supplied it.
        published: The file to which a `write` stage published the row, or all that may have it.
        notes: Further remarks.
    """

    stage: str
    kind: str
    partition: str | None
    keys: Mapping[str, Any] = field(default_factory=dict)
    url: str = ""
    row: int | None = None
    reads: Sequence[str] = ()
    manifest: str = ""
    run_id: str = ""
    committed_by: str = ""
    code_version: str = ""
    model: str = ""
    pool: str = ""
    workers: Sequence[str] = ()
    at: float | None = None
    seconds: float | None = None
    version: str = ""
    size: int | None = None
    copied_from: RowOrigin | None = None
    published: Sequence[str] = ()
    notes: Sequence[str] = ()
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Trace(Printed):
    """The trace of a row.

    Attributes:
        stage: The stage of the traced row, such as "docs/enriched" or "docs/source".
        partition: The partition's key.
        id: The row's id.
        forward: Whether the trace goes from the row to the rows made from it.
        steps: The rows of the trace, upstream first.
        omitted: By stage, the number of rows that are not listed.
        missing: In a forward trace, by downstream stage that lacks such rows, the reason; if it
            lacks only some, also their ids.
    """

    stage: str
    partition: str | None
    id: Any
    forward: bool
    steps: Sequence[Step]
    omitted: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as plain values that JSON can represent."""
        return asdict(self)

    def __str__(self) -> str:
        width = max((len(step.stage) for step in self.steps), default=0)
        width = max([width, *map(len, self.missing)])
        lines, last = [self._title(), ""], {step.stage: step for step in self.steps}
        for step in self.steps:
            label = step.stage
            for text in _lines(step):
                lines.append(f"{label:<{width}}  {text}")
                label = ""
            if step is last[step.stage] and step.stage in self.omitted:
                lines.append(f"{'':<{width}}  and {self.omitted[step.stage]:,} more rows")
        lines += [f"{stage:<{width}}  {reason}" for stage, reason in self.missing.items()]
        return "\n".join(lines)

    def _title(self) -> str:
        where = "" if self.partition is None else f", partition {self.partition}"
        way = "and the rows made from it" if self.forward else "back to the source"
        return f"{self.stage}{where}, id {self.id}, {way} (rows of files are counted from 0)"


def utc(seconds: float) -> str:
    """Format a Unix time for people."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _lines(step: Step) -> Iterator[str]:
    parts = [", ".join(f"{column} {value}" for column, value in step.keys.items())]
    if step.kind != "source":
        parts.append(f"{step.kind} of {', '.join(step.reads)}" if step.reads else step.kind)
    yield "; ".join(text for text in parts if text)
    if step.values:
        yield "; ".join(f"{column}: {value}" for column, value in step.values.items())
    if step.url:
        yield step.url if step.row is None else f"row {step.row} of {step.url}"
    if step.size:  # a table in memory has none, and its version is its URL
        yield f"{step.size:,} bytes, version {step.version}"
    yield from _published(step.published)
    if made := [text for text in (_runs(step), _time(step)) if text]:
        yield ", ".join(made)
    if step.workers:
        yield f"by {', '.join(step.workers)}"
    if step.copied_from:
        yield str(step.copied_from)
    if step.code_version:
        yield f"code {step.code_version}" + (f", manifest {step.manifest}" if step.manifest else "")
    if step.model:
        yield f"model {step.model}, pool {step.pool}"
    yield from (f"({note})" for note in step.notes)


def _published(urls: Sequence[str]) -> Iterator[str]:
    if urls:
        yield "published in" + (f" one of {len(urls):,} files" if len(urls) > 1 else "")
    yield from urls[:_MAX_PUBLISHED]


def _runs(step: Step) -> str:
    if step.committed_by in ("", step.run_id):
        return f"run {step.run_id}" if step.run_id else ""
    return f"run {step.run_id or 'unknown'}, committed by run {step.committed_by}"


def _time(step: Step) -> str:
    took = "" if step.seconds is None else f", {step.seconds:.3g} s for the part"
    return "" if step.at is None else f"{utc(step.at)}{took}"
