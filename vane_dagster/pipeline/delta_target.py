"""Delta tables as `write` declares them: what is refused before there is a table."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec

from vane_dagster.errors import DefinitionError
from vane_dagster.types.url_pattern import url_fields

PARTITION_COLUMN = "partition_key"
_COLUMN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_PROTOCOL = re.compile(r"(?:(file|s3|s3a)://)?(?![A-Za-z][A-Za-z0-9+.\-]*://)")
_MISREAD = re.compile(r"[%\\?#]")


def check_table(culprit: str, url: str, partition_column: str) -> None:
    """Checks what a Delta table is declared as.

    Raises:
        DefinitionError: If Delta Lake is not installed, or an argument does not fit.
    """
    if find_spec("deltalake") is None:
        raise DefinitionError(
            f"{culprit}: format='delta' needs the package deltalake. Install vane-dagster[delta]"
        )
    if fields := url_fields(url):
        raise DefinitionError(
            f"{culprit}: {url!r} has {{{fields[0]}}}, but a Delta table holds all partitions; take "
            "it out. The key stands in the column that partition_column names"
        )
    if not _PROTOCOL.match(url):
        raise DefinitionError(
            f"{culprit}: {url!r} cannot be a Delta table; expected a local path or s3://"
        )
    if found := _MISREAD.search(url):
        raise DefinitionError(
            f"{culprit}: {url!r} holds {found.group()!r}, which Delta's driver takes for a part of "
            "a URL; give the table another name"
        )
    if not isinstance(partition_column, str) or not _COLUMN.fullmatch(partition_column):
        raise DefinitionError(
            f"{culprit}: partition_column is {partition_column!r}; expected letters, digits and "
            "'_', with a letter first"
        )


def check_no_column(culprit: str, partition_column: str) -> None:
    """Raises DefinitionError where a plain folder is given a column for its partitions."""
    if partition_column != PARTITION_COLUMN:
        raise DefinitionError(
            f"{culprit}: partition_column={partition_column!r} is for format='delta'; a plain "
            "folder has {partition_key} in its URL, and no column for it"
        )


def check_apart(culprit: str, column: str, columns: Iterable[str]) -> None:
    """Raises DefinitionError where the column of the partitions is one of the rows' own."""
    for name in columns:
        if name.lower() == column.lower():
            raise DefinitionError(
                f"{culprit}: the rows have a column {name!r}, and the table needs "
                f"{column!r} for the partition's key; give partition_column another name, or "
                "rename the rows' column in a project"
            )
