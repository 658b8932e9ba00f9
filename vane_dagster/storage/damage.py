"""Detection of damaged parts, as opposed to storage failures.

Every page of a part has a checksum, which is verified whenever a part is read for a task. This
costs about a fifth of the decoding time, and nothing for columns that are not read. Verifying the
digest in a part's name would need a read of the whole part. Without either, nine in ten flipped
bits would become wrong rows without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa

from vane_dagster._lazy import pq
from vane_dagster.errors import DamagedPartError, first_line
from vane_dagster.storage.filesystem import StoragePath

_T = TypeVar("_T")


def read_whole(folder: StoragePath, name: str, read: Callable[[Any], _T]) -> _T:
    """Open a part and apply `read` to the file."""

    def attempt() -> _T:
        try:
            path = folder.file(name)  # Arrow's threads would need the GIL to read a Python file
            with pa.OSFile(path) if folder.is_local else folder.fs.open(path, "rb") as file:
                return read(file)
        except FileNotFoundError as error:
            raise DamagedPartError(f"part {folder.file_url(name)!r} is missing", name) from error
        except Exception as error:
            if not is_damage(error):
                raise
            raise damaged(folder, name, error) from error

    return folder.with_storage_errors("read", attempt, name)


def damaged(folder: StoragePath, name: str, error: Exception) -> DamagedPartError:
    """Return the error for a part that cannot be read."""
    return DamagedPartError(
        f"part {folder.file_url(name)!r} is damaged and cannot be read: "
        f"{type(error).__name__}: {first_line(error)}",
        name,
    )


def is_damage(error: BaseException) -> bool:
    """Return whether an error comes from a file's content, and not from the storage.

    Arrow raises a plain OSError without a number for pages that it cannot decode.
    """
    if isinstance(error, MemoryError):
        return False
    if isinstance(error, (pa.ArrowException, ValueError, KeyError)):
        return True
    return type(error) is OSError and error.errno is None


def damage_of(folder: StoragePath, name: str) -> DamagedPartError | None:
    """Read all of a part, and return its damage; None if it is whole."""
    try:
        read_whole(folder, name, lambda file: pq.read_table(file, page_checksum_verification=True))
    except DamagedPartError as error:
        return error
    return None


def verified() -> Any:
    """Return the file format for datasets of parts, with verification of checksums."""
    import pyarrow.dataset as ds  # imports pandas if it is installed

    options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    return ds.ParquetFileFormat(default_fragment_scan_options=options)
