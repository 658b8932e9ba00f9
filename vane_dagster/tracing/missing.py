"""Why a row is not there: where it was left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vane_dagster.errors import StoreError, TraceError, names
from vane_dagster.pipeline.specs import SOURCE
from vane_dagster.storage.manifest import FileSpan, FragmentRecord, Manifest
from vane_dagster.tracing.manifest_index import Book, file_of

_PIECES = 16
_MOST_ROWS = 1 << 62  # of a file whose rows nobody has counted
_MOST_MESSAGE = 200


def not_found(book: Book, manifest: Manifest, id: Any) -> TraceError:
    """The error for a row that a stage does not have: what was looked at, and who left it out."""
    label = book.label(manifest.stage)
    where = "" if book.partition is None else f", partition {book.partition!r}"
    ranges = [(part.id_min, part.id_max) for part in manifest.parts if part.rows]
    told = "it has no rows"
    if ranges:
        low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
        within = sum(low <= id <= high for low, high in ranges)
        told = (
            f"its {manifest.rows:,} rows have ids from {low!r} to {high!r}, and {within} of "
            f"{len(ranges)} parts have a range with this one"
        )
    found = left_out(book, manifest, id)
    reason = f". {found}" if found else ""
    return TraceError(f"{label!r}{where} has no row with {manifest.keys[0]} {id!r}: {told}{reason}")


def left_out(book: Book, manifest: Manifest, id: Any) -> str | None:
    """Where a row last stood above a stage that does not have it; None if nowhere."""
    has: tuple[str, int] | None = None
    lacking = []
    for upstream in manifest.reads:
        if upstream == SOURCE:
            if len(manifest.keys) == 1 and (hit := _in_source(book, manifest, id)):
                has = has or (
                    f"{book.label(SOURCE)!r}, row {hit.row} of {hit.url}",
                    hit.index,
                )
            continue
        above = book.above(manifest, upstream)
        if above is None or len(above.keys) != len(manifest.keys):
            continue
        try:
            located = book.locate(above, id)
        except (FileNotFoundError, StoreError):
            continue
        if located is None:
            lacking.append(above)
        else:
            has = has or (f"{book.label(upstream)!r}", located[0])
    for above in lacking:
        if reason := left_out(book, above, id):
            return reason
    if has is None:
        return None
    return f"It stands in {has[0]}, and was {leaving(book, manifest, has[1], [id])}"


def leaving(book: Book, manifest: Manifest, index: int, ids: Collection[Any]) -> str:
    """What became of rows that a part left out.

    Args:
        book: Where the manifest comes from.
        manifest: The manifest of the stage that left them out.
        index: The part.
        ids: The ids that the rows have above the stage.
    """
    part, label = manifest.parts[index], book.label(manifest.stage)
    verbs = [v for v, n in (("filtered", part.filtered), ("quarantined", part.quarantined)) if n]
    if not part.faults:
        return f"{' or '.join(verbs) or 'left out'} by {label!r}"
    folder = book.store.parts(manifest.pipeline, manifest.stage, manifest.partition)
    try:
        faults = pq.read_table(pa.BufferReader(folder.read(part.faults))).to_pylist()
    except (OSError, StoreError, pa.ArrowException):
        return f"{' or '.join(verbs) or 'left out'} by {label!r}"
    for fault in faults:
        if fault["id"] in ids:
            why = " ".join(str(fault["message"]).split())[:_MOST_MESSAGE]
            return f"quarantined by {label!r}: {fault['error']}: {why}"
    return f"{'filtered' if part.filtered else 'left out'} by {label!r}"


@dataclass(frozen=True)
class SourceRow:
    """A row of the source: the index of its fragment, its file, and its number in the file."""

    index: int
    url: str
    row: int


def _in_source(book: Book, manifest: Manifest, id: Any) -> SourceRow | None:
    """The row in the files that a manifest was made from, and its fragment."""
    try:
        return search_source(book, manifest, id)
    except (FileNotFoundError, StoreError):
        return None


def search_source(book: Book, manifest: Manifest, id: Any) -> SourceRow | None:
    """Looks a row up in the source files of a manifest, whatever its stage has left out.

    Raises:
        FileNotFoundError: If a file is gone.
        StoreError: If one cannot be read.
    """
    pieces = _pieces(
        manifest, [i for i, _ in enumerate(manifest.parts) if _may_hold(manifest, i, id)]
    )
    hit = book.find_in_source(manifest, list(pieces), id)
    if hit is None:
        return None
    span, row = hit
    fragments = pieces[span]
    index = next(i for i, f in fragments.items() if f.files or f.start <= row < f.stop)
    return SourceRow(index, span.url, row)


def _pieces(
    manifest: Manifest, indexes: Sequence[int]
) -> dict[FileSpan, dict[int, FragmentRecord]]:
    """Where to look for the rows of some fragments: spans, and the fragments that each holds.

    Consecutive fragments of a file are put together, so that the file is opened few times.
    """
    most = -(-len(indexes) // _PIECES)
    pieces: dict[FileSpan, dict[int, FragmentRecord]] = {}
    last: FileSpan | None = None
    for index in indexes:
        fragment = manifest.fragments[index]
        joins = last is not None and (last.url, last.stop) == (fragment.url, fragment.start)
        if last is not None and joins and not fragment.files and len(pieces[last]) < most:
            held = pieces.pop(last)
            last = FileSpan(last.url, last.start, fragment.stop)
            pieces[last] = {**held, index: fragment}
            continue
        pieces.update((span, {index: fragment}) for span in fragment.spans)
        last = None if fragment.files else fragment.spans[0]
    return pieces


def search_changed(book: Book, manifest: Manifest, id: Any) -> tuple[FileSpan, int] | None:
    """Looks a row up in the source files that are not any more what a manifest recorded."""
    recorded = [file for url in _urls(manifest) if (file := file_of(manifest, url))]
    changed = [FileSpan(file.url, 0, _MOST_ROWS) for file in recorded if book.changed(file)]
    try:
        return book.find_in_source(manifest, changed, id)
    except (FileNotFoundError, StoreError):
        return None


def looked_at(manifest: Manifest) -> str:
    """The source files of a manifest, for messages."""
    return names(_urls(manifest), 3)


def _urls(manifest: Manifest) -> dict[str, None]:
    return dict.fromkeys(span.url for each in manifest.fragments for span in each.spans)


def _may_hold(manifest: Manifest, index: int, id: Any) -> bool:
    """Whether a fragment may have a row; not where a part has all of its rows and not this one."""
    part, fragment = manifest.parts[index], manifest.fragments[index]
    if len(manifest.keys) != 1 or part.rows != fragment.stop - fragment.start or not part.rows:
        return True
    return bool(part.id_min <= id <= part.id_max)
