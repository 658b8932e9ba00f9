"""Explains why a stage lacks a row: which stage dropped it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from vane_dagster._texts import count, in_partition
from vane_dagster.errors import StoreError, TraceError, names
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.storage.manifest import FileSpan, Manifest
from vane_dagster.storage.part_file import read_part
from vane_dagster.tracing.manifest_index import ManifestIndex

_MAX_MESSAGE_LENGTH = 200


def not_found(manifest_index: ManifestIndex, manifest: Manifest, id: Any) -> TraceError:
    """Return the error for a row that a stage lacks, with the stage that dropped it.

    The error also gives the range of ids that the stage has.
    """
    label = manifest_index.label(manifest.stage)
    where = in_partition(manifest_index.partition)
    parts = [part for part in manifest.parts if part.rows]
    explanation = "it has no rows"
    if parts:
        low, high = min(part.id_min for part in parts), max(part.id_max for part in parts)
        explanation = f"its {manifest.rows:,} rows have ids from {low!r} to {high!r}"
    cause = left_out(manifest_index, manifest, id)
    reason = f". {cause}" if cause else ""
    return TraceError(
        f"{label!r}{where} has no row with {manifest.keys[0]} {id!r}: {explanation}{reason}"
    )


def left_out(manifest_index: ManifestIndex, manifest: Manifest, id: Any) -> str | None:
    """Describe the last upstream stage with a row that a stage lacks; None if there is none."""
    has: tuple[str, int] | None = None
    lacking, parents = list[tuple[Manifest, Any]](), list[Manifest]()
    keys: Sequence[Any] = ()
    for upstream in manifest.reads:
        if upstream == SOURCE:
            with suppress(FileNotFoundError, StoreError):
                if len(manifest.keys) == 1 and (hit := search_source(manifest_index, manifest, id)):
                    index, file, row = hit
                    label = manifest_index.label(SOURCE)
                    has = has or (f"{label!r}, row {row} of {file.url}", index)
            continue
        above = manifest_index.above(manifest, upstream)
        if above is None or len(above.keys) != len(manifest.keys):
            parents += [] if above is None else [above]
            continue
        try:
            located = manifest_index.locate(above, id)
        except (FileNotFoundError, StoreError):
            continue
        if located is None:
            lacking.append((above, id))
        else:
            has = has or (f"{manifest_index.label(upstream)!r}", located[0])
            keys = located[1].keys
    for above in parents if keys else ():  # a join of children with the rows they were made from
        parent = keys[-len(above.keys)]
        with suppress(FileNotFoundError, StoreError):
            lacking += [] if manifest_index.locate(above, parent) else [(above, parent)]
    for above, lacked in lacking:
        if reason := left_out(manifest_index, above, lacked):
            of_parent = len(above.keys) != len(manifest.keys)
            return f"Its {above.keys[0]} is {lacked!r}. {reason}" if of_parent else reason
    if has is None:
        return _parent(manifest_index, manifest, id) if manifest.info.get("children") else None
    return f"It is in {has[0]} but was {leaving(manifest_index, manifest, has[1], [id])}"


def _parent(manifest_index: ManifestIndex, manifest: Manifest, id: Any) -> str | None:
    """Describe the row that a fan-out would have made a row from; None if the id does not tell."""
    text, (upstream,) = str(id).rpartition("-")[0], manifest.reads
    hit: tuple[int, *tuple[Any, ...]] | None = None
    with suppress(FileNotFoundError, StoreError, TraceError):
        parent = manifest_index.converted(manifest, 1, manifest.stage, text)
        described = f"It would be made from {manifest.keys[1]} {parent!r}"
        if upstream == SOURCE:
            hit = search_source(manifest_index, manifest, parent)
        elif above := manifest_index.above(manifest, upstream):
            hit = manifest_index.locate(above, parent)
            if hit is None and (reason := left_out(manifest_index, above, parent)):
                return f"{described}. {reason}"
        if hit and (made := manifest_index.find(manifest, hit[0], {1: {parent: None}})):
            return f"{described}, as are {count(len(made), 'row')} of the stage"
        if hit:
            return f"{described}, which was {leaving(manifest_index, manifest, hit[0], [parent])}"
    return None


def leaving(
    manifest_index: ManifestIndex, manifest: Manifest, index: int, ids: Collection[Any]
) -> str:
    """Describe what happened to rows that a part lacks."""
    part, label = manifest.parts[index], manifest_index.label(manifest.stage)
    folder = manifest_index.store.parts_of(manifest)
    try:
        faults = read_part(folder, part.faults).to_pylist() if part.faults else []
    except StoreError:
        return f"{'filtered or ' if part.filtered else ''}quarantined by {label!r}"
    for fault in faults:
        if fault["id"] in ids:
            why = " ".join(str(fault["message"]).split())[:_MAX_MESSAGE_LENGTH]
            origin = manifest_index.origin(manifest, index, fault["id"])
            copied = f" ({origin})" if origin else ""
            return f"quarantined by {label!r}: {fault['error']}: {why}{copied}"
    return f"{'filtered' if part.filtered else 'dropped'} by {label!r}"


def search_source(
    manifest_index: ManifestIndex, manifest: Manifest, id: Any
) -> tuple[int, FileSpan, int] | None:
    """Find a row in the source files of a manifest, including rows that its stage dropped.

    Return the index of its fragment, its file, and its number in the file.
    """
    spans = {span: i for i, each in enumerate(manifest.fragments) for span in each.spans}
    hit = manifest_index.find_in_source(manifest, list(spans), id)
    return None if hit is None else (spans[hit[0]], *hit)


def looked_at(manifest: Manifest) -> str:
    """Name the source files of a manifest in messages."""
    return names(dict.fromkeys(s.url for each in manifest.fragments for s in each.spans), 3)
