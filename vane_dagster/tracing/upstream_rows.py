"""Sources that are rows of another pipeline, where a trace goes on."""

from __future__ import annotations

from dataclasses import dataclass

from vane_dagster.errors import StoreError
from vane_dagster.storage.filesystem import Location, protocol_of
from vane_dagster.storage.manifest import Manifest, ManifestName
from vane_dagster.storage.row_search import Found, RowFile, row_at
from vane_dagster.tracing.manifest_index import Book
from vane_dagster.tracing.steps import Step

_MOST_MANIFESTS = 50


@dataclass(frozen=True)
class Beyond:
    """A row of another pipeline: its manifest, part and place."""

    book: Book
    name: str
    manifest: Manifest
    index: int
    found: Found


def beyond(book: Book, step: Step) -> Beyond | None:
    """The row of another pipeline's stage that a row of the source is; None if it is none.

    Raises:
        StoreError: If a manifest cannot be read.
    """
    place = _stage_of(book, step.url)
    if place is None or step.row is None:
        return None
    pipeline, stage, folder, file = place
    manifests = book.store.root.child(pipeline, stage, "manifests", folder)
    named = sorted((n for n in manifests.names() if ManifestName.parse(n)), reverse=True)
    for name in named[:_MOST_MANIFESTS]:
        manifest = book.store.opened(manifests, name)
        index = next((i for i, part in enumerate(manifest.parts) if part.name == file), None)
        if index is not None and manifest.keys and manifest.reads:
            other = Book(book.store, pipeline, manifest.partition)
            part = RowFile(book.store.parts(pipeline, stage, manifest.partition), file)
            try:
                found = row_at(part, manifest.keys, step.row)
            except (FileNotFoundError, StoreError):
                return None
            return Beyond(other, name, manifest, index, found)
    return None


def _stage_of(book: Book, url: str) -> tuple[str, str, str, str] | None:
    """Pipeline, stage, folder of the partition and file name of a part in the store."""
    root = book.store.root
    if protocol_of(url) != protocol_of(root.url):
        return None
    path, above = Location(url, root.storage_options).path, f"{root.path}/"
    names = path[len(above) :].split("/") if path.startswith(above) else []
    if len(names) != 5 or names[2] != "parts" or names[0].startswith("~"):
        return None
    return names[0], names[1], names[3], names[4]
