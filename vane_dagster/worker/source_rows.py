"""Rows of the source, read in the worker and compared with what was planned."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pyarrow as pa

from vane_dagster.errors import IntegrityError, SourceError, VaneError
from vane_dagster.sources import ReadContext, Source
from vane_dagster.sources.base import unreadable
from vane_dagster.sources.files import file_version
from vane_dagster.storage.transient_errors import persistently
from vane_dagster.worker.database import connection
from vane_dagster.worker.id_checks import repeated_or_null
from vane_dagster.worker.protocol import Project, SourceRows, Work
from vane_dagster.worker.user_code import load


def scan(rows: SourceRows, work: Work) -> pa.Table:
    """The rows as they are.

    Raises:
        SourceError: If they cannot be read, or their ids are not unique.
        IntegrityError: If there are more or fewer than planned.
    """
    return checked_ids(scan_unchecked(rows, work), rows, work)


def scan_unchecked(rows: SourceRows, work: Work) -> pa.Table:
    """The rows as they are, with ids that may not be unique.

    Raises:
        SourceError: If they cannot be read.
        IntegrityError: If there are more or fewer than planned.
    """
    source, context = unpack_source(rows.source), ReadContext(work.culprit, connection)
    table = _as_planned(lambda: source.read(rows.fragment, rows.schema, context), rows, work)
    assert table is not None
    if table.num_rows != rows.count:
        names = " and ".join(repr(file.url) for file in rows.files[:3])
        raise IntegrityError(
            f"{work.culprit}: {table.num_rows} rows were read of {names}, expected {rows.count} "
            "by what was planned. Write the file again"
        )
    return table.select(rows.schema.names).cast(rows.schema)


def scan_projected(op: Project, rows: SourceRows, work: Work) -> pa.Table | None:
    """SQL columns and a filter, where the source can compute them.

    Returns:
        The rows that the filter keeps; None if the source cannot compute.

    Raises:
        SourceError: If they cannot be read, or their ids are not unique.
        SchemaError: If an expression fails for a row.
    """
    source, context = unpack_source(rows.source), ReadContext(work.culprit, connection)
    table = _as_planned(
        lambda: source.project(rows.fragment, rows.schema, op.columns, op.where, context),
        rows,
        work,
    )
    return None if table is None else checked_ids(table, rows, work)


def checked_ids(table: pa.Table, rows: SourceRows, work: Work) -> pa.Table:
    """The table.

    Raises:
        SourceError: If its ids are not unique, or some are null.
    """
    if wrong := repeated_or_null(table.column(rows.id)):
        raise SourceError(
            f"{work.culprit}: the source has {wrong} in {rows.id!r}; an id must be unique and not "
            "null inside a partition. Mend the source, or filter the rows out with where="
        )
    return table


def _as_planned(
    read: Callable[[], pa.Table | None], rows: SourceRows, work: Work
) -> pa.Table | None:
    """What is read, of files that are still those that the fragment's key stands for."""
    try:
        table = read()
    except VaneError:
        raise
    except Exception as error:  # a file that is replaced meanwhile may raise anything
        _check_files(rows, work)
        raise unreadable(rows.files[0].url, error, work.culprit) from error
    _check_files(rows, work)
    return table


def _check_files(rows: SourceRows, work: Work) -> None:
    source = unpack_source(rows.source)
    for file in rows.files:
        try:
            now = persistently(functools.partial(source.current, file))
        except Exception as error:  # drivers have exceptions of their own, of many kinds
            raise unreadable(file.url, error, work.culprit) from error
        if file_version(now) != file_version(file):
            raise SourceError(
                f"{work.culprit}: {file.url!r} was replaced while the run read it ({file.size} "
                f"bytes when it was planned, {now.size} now). Run the partition again"
            )


@functools.lru_cache(maxsize=32)
def unpack_source(payload: bytes) -> Source:
    """The source that `planning.source_code.pack_source` pickled."""
    source: Source = load(payload)
    return source
