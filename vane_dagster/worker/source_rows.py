"""Reads of source rows in a worker, compared with the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pyarrow as pa

from vane_dagster.errors import IntegrityError, SourceError, VaneError
from vane_dagster.sources import ReadContext, SourceReader
from vane_dagster.sources.base import unreadable
from vane_dagster.sources.files import file_version
from vane_dagster.storage.transient_errors import with_retries
from vane_dagster.worker.database import connection
from vane_dagster.worker.id_checks import repeated_or_null
from vane_dagster.worker.protocol import Project, SourceRows, Work
from vane_dagster.worker.user_code import load


def scan(rows: SourceRows, work: Work) -> pa.Table:
    """Read the rows unchanged.

    Args:
        rows: The rows.
        work: The task, for messages.

    Raises:
        SourceError: If they cannot be read, or their ids are not unique.
        IntegrityError: If there are more or fewer than planned.
    """
    return checked_ids(scan_unchecked(rows, work), rows, work)


def scan_unchecked(rows: SourceRows, work: Work) -> pa.Table:
    """Read the rows unchanged, without a check of their ids.

    Args:
        rows: The rows.
        work: The task, for messages.

    Raises:
        SourceError: If they cannot be read.
        IntegrityError: If there are more or fewer than planned.
    """
    source, context = unpack_source(rows.source), ReadContext(work.location, connection)
    table = _as_planned(lambda: source.read(rows.fragment, rows.schema, context), rows, work)
    assert table is not None
    if table.num_rows != rows.count:
        names = " and ".join(repr(file.url) for file in rows.files[:3])
        raise IntegrityError(
            f"{work.location}: {table.num_rows} rows were read of {names}, expected {rows.count} "
            "by what was planned. Write the file again"
        )
    return table.select(rows.schema.names).cast(rows.schema)


def scan_projected(op: Project, rows: SourceRows, work: Work) -> pa.Table | None:
    """Compute SQL columns and a filter in the source, if it can compute them.

    Args:
        op: The columns and the filter.
        rows: The rows.
        work: The task, for messages.

    Returns:
        The rows that pass the filter; None if the source cannot compute.

    Raises:
        SourceError: If the rows cannot be read, or their ids are not unique.
        SchemaError: If an expression fails for a row.
    """
    source, context = unpack_source(rows.source), ReadContext(work.location, connection)
    table = _as_planned(
        lambda: source.project(rows.fragment, rows.schema, op.columns, op.where, context),
        rows,
        work,
    )
    return None if table is None else checked_ids(table, rows, work)


def checked_ids(table: pa.Table, rows: SourceRows, work: Work) -> pa.Table:
    """Return a table unchanged after a check of its ids.

    Args:
        table: The rows.
        rows: Where they come from, with the name of the id column.
        work: The task, for messages.

    Raises:
        SourceError: If its ids are not unique, or some are null.
    """
    if wrong := repeated_or_null(table.column(rows.id)):
        raise SourceError(
            f"{work.location}: the source has {wrong} in {rows.id!r}; an id must be unique and not "
            "null inside a partition. Fix the source, or filter the rows out with where="
        )
    return table


def _as_planned(
    read: Callable[[], pa.Table | None], rows: SourceRows, work: Work
) -> pa.Table | None:
    """Read rows, and check that the files are still those of the fragment's key."""
    try:
        table = read()
    except VaneError:
        raise
    except Exception as error:  # a file that is replaced during the read may raise anything
        _check_files(rows, work)
        raise unreadable(rows.files[0].url, error, work.location) from error
    _check_files(rows, work)
    return table


def _check_files(rows: SourceRows, work: Work) -> None:
    source = unpack_source(rows.source)
    for file in rows.files:
        try:
            now = with_retries(functools.partial(source.current, file))
        except Exception as error:  # drivers raise their own exception classes
            raise unreadable(file.url, error, work.location) from error
        if file_version(now) != file_version(file):
            raise SourceError(
                f"{work.location}: {file.url!r} was replaced while the run read it ({file.size} "
                f"bytes when it was planned, {now.size} now). Run the partition again"
            )


@functools.lru_cache(maxsize=32)
def unpack_source(payload: bytes) -> SourceReader:
    """Unpickle what `planning.source_code.pack_source` pickled."""
    source: SourceReader = load(payload)
    return source
