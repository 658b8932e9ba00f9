"""A folder that tests change, and that is as it was for the next."""

from __future__ import annotations

import shutil
from pathlib import Path


class Snapshot:
    """A folder as it is now: its files with their times, under the same paths."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept = folder.with_name(f"{folder.name}-kept")
        shutil.copytree(folder, self._kept, symlinks=True)

    def restore(self) -> Path:
        shutil.rmtree(self.folder)
        shutil.copytree(self._kept, self.folder, symlinks=True)
        return self.folder
