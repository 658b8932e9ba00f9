"""Damaged parts: told from storage that fails, and from parts that are whole.

Every page of a part carries a checksum, which is verified whenever a part is read for work. That
costs about a fifth of the time that decoding takes, and nothing where columns are not read, while
the digest in a part's name could only be verified by reading all of it. Without either, nine in ten
flipped bits would become wrong rows without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from vane_dagster.errors import DamagedPartError
from vane_dagster.storage.filesystem import Location

_T = TypeVar("_T")


def read_whole(folder: Location, name: str, read: Callable[[Any], _T]) -> _T:
    """What `read` makes of a part, which it is given as an open file.

    What cannot be read as a part is fetched once more: the way here may have damaged it.

    Raises:
        DamagedPartError: If it is damaged or gone.
        StoreError: If the file system refuses.
    """

    def attempt() -> _T:
        try:
            with folder.fs.open(folder.file(name), "rb") as file:
                return read(file)
        except FileNotFoundError as error:
            raise DamagedPartError(f"part {folder.file_url(name)!r} is gone", name) from error
        except Exception as error:
            if not is_damage(error):
                raise
            raise DamagedPartError(
                f"part {folder.file_url(name)!r} is damaged and cannot be read: "
                f"{type(error).__name__}: {_first_line(error)}",
                name,
            ) from error

    try:
        return folder.with_storage_errors("read", attempt, name)
    except DamagedPartError:
        return folder.with_storage_errors("read", attempt, name)


def is_damage(error: BaseException) -> bool:
    """Whether an error is of a file's content, and not of the storage that holds it.

    Arrow raises a plain OSError without a number for pages that it cannot decode.
    """
    if isinstance(error, MemoryError):
        return False
    if isinstance(error, (pa.ArrowException, ValueError, KeyError)):
        return True
    return type(error) is OSError and error.errno is None


def damage_of(folder: Location, name: str) -> DamagedPartError | None:
    """What is wrong with a part, all of which is read; None of one that is whole.

    Raises:
        StoreError: If the file system refuses.
    """
    try:
        read_whole(folder, name, lambda file: pq.read_table(file, page_checksum_verification=True))
    except DamagedPartError as error:
        return error
    return None


def verified() -> Any:
    """The format in which datasets read parts, whose checksums are verified."""
    import pyarrow.dataset as ds  # which imports pandas where there is one

    options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    return ds.ParquetFileFormat(default_fragment_scan_options=options)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
