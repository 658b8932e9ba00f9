"""One file system for files of several: a branch on a local disk, and its fallback on S3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsspec import AbstractFileSystem

from vane_dagster.storage.filesystem import Location


class MixedFiles(AbstractFileSystem):  # type: ignore[misc,unused-ignore]  # fsspec has no types
    """Reads files of several folders. A path is the number of a folder, and a path on its system.

    Args:
        places: The folders.
    """

    protocol = "vane-mixed"
    cachable = False

    def __init__(self, places: Sequence[Location], **options: Any) -> None:
        super().__init__(places=places, **options)
        self._systems = [place.fs for place in places]

    def _resolved(self, path: str) -> tuple[Any, str]:
        index, _, own = str(self._strip_protocol(path)).partition(":")
        return self._systems[int(index)], own

    def info(self, path: str, **options: Any) -> Mapping[str, Any]:
        """Describe a file."""
        fs, own = self._resolved(path)
        return {**fs.info(own), "name": path}

    def modified(self, path: str) -> Any:
        """Return when a file was changed."""
        fs, own = self._resolved(path)
        return fs.modified(own)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """Open a file."""
        fs, own = self._resolved(path)
        return fs.open(own, mode, **options)


def file_system(
    folders: Sequence[Location], names: Sequence[Sequence[str]]
) -> tuple[Any, list[str]]:
    """Return one file system for files of several folders, and their paths on it.

    Args:
        folders: The folders.
        names: The names of files of each.
    """
    by_system = {id(folder.fs): folder for folder in folders}
    paths = [[folder.file(name) for name in own] for folder, own in zip(folders, names)]
    if len(by_system) == 1:
        return folders[0].fs, [path for own in paths for path in own]
    places = list(by_system)
    mixed = [
        f"{places.index(id(folder.fs))}:{path}"
        for folder, own in zip(folders, paths)
        for path in own
    ]
    return MixedFiles(tuple(by_system.values())), mixed
