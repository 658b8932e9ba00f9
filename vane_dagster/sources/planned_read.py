"""Reads of a planned fragment, in a worker or the driver: its files must not have changed since."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pyarrow as pa

from vane_dagster.errors import IntegrityError, SourceError, VaneError
from vane_dagster.retries import with_retries
from vane_dagster.sources.base import (
    ROW_ERROR,
    ROW_ERROR_TYPE,
    SourceReader,
    unreadable,
)
from vane_dagster.sources.files import file_version, reconcile
from vane_dagster.sources.row_ids import IdRule
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.types.casts import cast_table


def read_planned(
    source: SourceReader,
    fragment: FragmentRecord,
    schema: pa.Schema,
    files: Sequence[FileRecord],
    location: str,
    id_rule: IdRule | None = None,
) -> pa.Table:
    """Read the rows of a fragment, and check that its files have not changed since its plan."""
    read = functools.partial(id_rule.read, source) if id_rule else source.read
    try:
        try:
            table = read(fragment, schema, location)
        finally:  # a file that is replaced during the read may raise anything
            if source.reads_contents:
                check_unchanged(source, files, location)
    except VaneError:
        raise
    except Exception as error:  # drivers raise their own exception classes
        raise unreadable(files[0].url, error, location) from error
    if table.num_rows != fragment.rows:
        names = " and ".join(repr(file.url) for file in files[:3])
        raise IntegrityError(
            f"{location}: {table.num_rows} rows were read of {names}, but the plan has "
            f"{fragment.rows}. Write the file again"
        )
    return fitted(table, schema)


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast rows of the source to a schema, and keep the errors of rows that could not be read."""
    if ROW_ERROR in table.column_names:
        schema = schema.append(pa.field(ROW_ERROR, ROW_ERROR_TYPE))
    return cast_table(table, schema)


def check_unchanged(source: SourceReader, files: Sequence[FileRecord], location: str) -> None:
    """Check that files have not changed since the fragment was planned."""

    def check(file: FileRecord) -> None:
        try:
            now = with_retries(functools.partial(source.current, file))
        except Exception as error:  # drivers raise their own exception classes
            raise unreadable(file.url, error, location) from error
        (kept,) = reconcile([now], [file], source)  # it may have been touched since it was recorded
        if file_version(kept) != file_version(file):
            raise SourceError(
                f"{location}: {file.url!r} was replaced after it was listed ({file.size} "
                f"bytes then, {now.size} now). Run the partition again, with all upstream stages"
            )

    in_threads(check, files)
