"""Steps of a trace, made of what manifests say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vane_dagster.errors import StoreError
from vane_dagster.pipeline.specs import SOURCE
from vane_dagster.storage.manifest import FileSpan, FragmentRecord, Manifest
from vane_dagster.storage.row_search import Found, RowFile
from vane_dagster.tracing.manifest_index import Book, file_of
from vane_dagster.tracing.steps import Step


def stage_step(
    book: Book,
    manifest: Manifest,
    name: str,
    index: int,
    found: Found | None,
    keys: Sequence[Any] = (),
    notes: Sequence[str] = (),
) -> Step:
    """The step of a row in a part.

    Args:
        book: Where the manifest comes from.
        manifest: The manifest.
        name: Its name.
        index: The part.
        found: The row; None if it could not be looked up.
        keys: Its keys as far as they are known otherwise.
        notes: What else there is to say.
    """
    made = manifest.parts[index].made
    keys = found.keys if found else keys
    published = book.published(manifest, index, found) if found else None
    if found and isinstance(published, tuple):
        found = Found(published[0], published[1], found.keys)
    return Step(
        stage=book.label(manifest.stage),
        kind=manifest.kind,
        partition=manifest.partition,
        keys=dict(zip(manifest.keys, keys)),
        url=found.file.url if found else "",
        row=found.row if found else None,
        reads=tuple(manifest.reads),
        manifest=name,
        run_id=made.run_id if made else "",
        committed_by=manifest.run_id,
        code_version=manifest.definition,
        model=manifest.model.get("name", ""),
        pool=manifest.model.get("pool", ""),
        workers=made.workers if made else (),
        at=made.at if made else None,
        seconds=made.seconds if made else None,
        published=_urls(published),
        notes=tuple(notes),
    )


def _urls(published: tuple[RowFile, int] | list[str] | None) -> tuple[str, ...]:
    if isinstance(published, tuple):
        return (published[0].url,)
    return tuple(published or ())


def source_step(book: Book, manifest: Manifest, index: int, id: Any) -> Step:
    """The step of a row in its source file, as a manifest recorded the file.

    What has become of the file since is a note.
    """
    fragment = manifest.fragments[index]
    column = book.source_id(manifest)
    span = _file_with(book, manifest, fragment, id)
    recorded = file_of(manifest, span.url)
    note = book.changed(recorded) if recorded else None
    row = None
    if note is None:
        try:
            hit = book.find_in_source(manifest, [span], id)
            row = hit[1] if hit else None
            note = None if hit else f"no such row in {_rows(span, fragment)}"
        except (FileNotFoundError, StoreError) as error:
            note = f"the file cannot be read: {error}"
    notes = [note] if note else []
    if row is None and fragment.files:
        notes.append(f"the row was one of {fragment}")
    elif row is None:
        notes.append(f"the row was one of {fragment.start} to {fragment.stop - 1}")
    return Step(
        stage=book.label(SOURCE),
        kind=SOURCE,
        partition=book.partition,
        keys={column: id},
        url=span.url,
        row=row,
        version=recorded.version if recorded else "",
        size=recorded.size if recorded else None,
        notes=tuple(notes),
    )


def _file_with(book: Book, manifest: Manifest, fragment: FragmentRecord, id: Any) -> FileSpan:
    """The file of a fragment that has a row; the first if none is found."""
    spans = fragment.spans
    if len(spans) == 1:
        return spans[0]
    try:
        hit = book.find_in_source(manifest, spans, id)
    except (FileNotFoundError, StoreError):
        hit = None
    return hit[0] if hit else spans[0]


def _rows(span: FileSpan, fragment: FragmentRecord) -> str:
    return str(fragment) if fragment.files else f"rows {span.start} to {span.stop}"
