"""Reads of source rows in a worker, with a check of their ids."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._texts import count
from vane_dagster.errors import SourceError, names
from vane_dagster.sources import SourceReader
from vane_dagster.sources.base import ROW_ERROR
from vane_dagster.sources.file import TaskFiles
from vane_dagster.sources.planned_read import check_unchanged, read_planned
from vane_dagster.sources.raw_files import PATH
from vane_dagster.types.tensors import unsliced
from vane_dagster.worker.id_checks import repeated_or_null
from vane_dagster.worker.protocol import SourceRows, Work
from vane_dagster.worker.user_code import load


def scan(rows: SourceRows, work: Work) -> pa.Table:
    """Read the rows unchanged."""
    return checked_ids(scan_unchecked(rows, work), rows, work)


def scan_unchecked(rows: SourceRows, work: Work) -> pa.Table:
    """Read the rows unchanged, without a check of their ids."""
    source = unpack_source(rows.source)
    planned = (rows.fragment, rows.schema, rows.files)
    table = unsliced(read_planned(source, *planned, work.location, rows.id_rule))
    if ROW_ERROR not in table.column_names:
        return table
    errors = table.filter(pc.is_null(table.column(rows.id))).column(ROW_ERROR).drop_null()
    if len(errors):
        first = errors[0].as_py()
        raise SourceError(
            f"{work.location}: {count(len(errors), 'row')} of the source could not be read, so no "
            f"id {rows.id!r} is known; the first error: {first['error']}: {first['message']}"
        )
    return table


def checked_ids(table: pa.Table, rows: SourceRows, work: Work) -> pa.Table:
    """Return a table unchanged after a check of its ids."""
    if wrong := repeated_or_null(table.column(rows.id)):
        of = names(rows.id_rule.columns) if rows.id_rule else ""
        made = f", which is made from {of}" if of else ""
        raise SourceError(
            f"{work.location}: the source has {wrong} in {rows.id!r}{made}; an id must be unique "
            "and not null inside a partition. Fix the source, or exclude the rows with where="
        )
    return table


@contextmanager
def known_files(table: pa.Table, work: Work) -> Iterator[None]:
    """Let the user's code open the files of the source, and verify afterwards those it may have."""
    if work.source_files is None:
        yield
        return
    source, planned = unpack_source(work.source_files.source), work.source_files.files
    files = TaskFiles(source, planned)
    paths = table.column(PATH).to_pylist() if PATH in table.column_names else []
    with files.active():
        try:
            yield
        finally:  # a replaced file may also be the cause of an error
            check_unchanged(source, files.records(paths), work.location)


@functools.lru_cache(maxsize=32)
def unpack_source(payload: bytes) -> SourceReader:
    """Unpickle what `planning.source_code.pack_source` pickled."""
    source: SourceReader = load(payload)
    return source
