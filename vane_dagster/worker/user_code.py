"""The user's modules in a worker: unpacking and importing. `fingerprint.bundle` packs them."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import pickle
import re
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vane_dagster._private_folder import private_folder
from vane_dagster.errors import ComputeError
from vane_dagster.storage.filesystem import Location
from vane_dagster.worker.local_copies import local_copy
from vane_dagster.worker.node_files import new_entry, shared_entry

_DIGEST = re.compile(r"[0-9a-f]{64}")


def unpack(archive: bytes, digest: str, root: Path) -> Path:
    """Extract an archive to ``root/<digest>`` atomically; many processes may do so at once.

    If the folder exists, it is compared with the archive, file by file. A folder that differs is
    replaced: some of its files were deleted as old temporary files, or it was tampered with.
    """
    actual = hashlib.sha256(archive).hexdigest()
    if not _DIGEST.fullmatch(digest) or actual != digest:
        raise ComputeError(
            f"The code that arrived has digest {actual}, expected {digest}: it was changed or cut "
            f"on its way. Run again; if it stays so, check what carries data to the workers."
        )
    files = _entries(archive)
    folder = private_folder(root) / digest

    def find() -> Path | None:
        return folder if _holds(folder, files) else None

    def make() -> Path:
        with new_entry(folder.parent, digest) as partial:
            for name, content in files.items():
                target = partial / "new" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        return folder

    return shared_entry(folder.parent, digest, find, make, hold=True)


def _entries(archive: bytes) -> dict[str, bytes]:
    """Return the content of the files of an archive, by path."""
    files = {}
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        for info in opened.infolist():
            parts = info.filename.split("/")
            if any(part in ("", ".", "..") or "\\" in part or ":" in part for part in parts):
                raise ComputeError(
                    f"The code's archive holds {info.filename!r}, which would lie outside of its "
                    f"folder. Only archives that `pack` made are accepted."
                )
            files[info.filename] = opened.read(info)
    return files


def _holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Return whether a folder holds exactly these files, and no links.

    Compiled modules are deleted: Python imports one if its source has the expected time and size.
    """
    found: dict[str, bytes] = {}
    for place, folders, names in os.walk(folder):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
            cache = os.path.join(place, "__pycache__")
            os.unlink(cache) if os.path.islink(cache) else shutil.rmtree(cache, ignore_errors=True)
        paths = [Path(place, name) for name in names]
        inner = [Path(place, name) for name in folders]
        if any(path.is_symlink() for path in (folder, *paths, *inner)):
            return False
        if not all(path.is_file() for path in paths):
            return False
        found |= {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return found == files


def activate(folder: Path) -> None:
    """Make a folder that `unpack` returned the first place to import from."""
    root = os.path.join(os.path.realpath(folder.parent), "")
    places = [place for place in sys.path if not os.path.realpath(place).startswith(root)]
    sys.path[:] = [str(folder.resolve()), *places]
    importlib.invalidate_caches()


def load(payload: bytes, files: Location | None = None) -> Any:
    """Unpickle what `pickled` pickled; the folder of its modules must be active."""
    return _Unpickler(payload, files).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, payload: bytes, files: Location | None) -> None:
        super().__init__(io.BytesIO(payload))
        self._files = files

    def persistent_load(self, digest: str) -> str:
        if self._files is None:
            raise pickle.UnpicklingError(f"the file {digest} came without the store that has it")
        return local_copy(digest, self._files)
