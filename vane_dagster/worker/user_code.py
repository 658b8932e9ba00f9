"""The user's modules in a worker: unpacking and importing. `fingerprint.bundle` packs them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

from vane_dagster._private_folder import private_folder
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.worker.local_copies import local_copy
from vane_dagster.worker.node_files import new_entry, shared_entry


def unpack(archive: bytes, root: Path) -> Path:
    """Extract an archive to ``root/<its sha256>`` atomically; many processes may do so at once.

    If the folder exists, its files are compared with the archive. A folder that lacks some, deleted
    as old temporary files, or has others is replaced.
    """
    digest = hashlib.sha256(archive).hexdigest()
    folder = private_folder(root) / digest
    opened = zipfile.ZipFile(io.BytesIO(archive))

    def find() -> Path | None:
        with contextlib.suppress(OSError):
            names = opened.namelist()
            is_whole = all((folder / name).read_bytes() == opened.read(name) for name in names)
            return folder if is_whole and folder.is_dir() else None
        return None

    def make() -> Path:
        with new_entry(folder.parent, digest) as partial:
            opened.extractall(partial / "new")
        return folder

    return shared_entry(folder.parent, digest, find, make, hold=True)


def activate(folder: Path) -> None:
    """Make a folder that `unpack` returned the first place to import from."""
    root = os.path.join(os.path.realpath(folder.parent), "")
    places = [place for place in sys.path if not os.path.realpath(place).startswith(root)]
    sys.path[:] = [str(folder.resolve()), *places]
    importlib.invalidate_caches()


def load(payload: bytes, files: StoragePath | None = None) -> Any:
    """Unpickle what `pickled` pickled; the folder of its modules must be active."""
    return _Unpickler(payload, files).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, payload: bytes, files: StoragePath | None) -> None:
        super().__init__(io.BytesIO(payload))
        self._files = files

    def persistent_load(self, digest: str) -> str:
        if self._files is None:
            raise pickle.UnpicklingError(
                f"the file {digest} was sent without the store that contains it"
            )
        return local_copy(digest, self._files)
