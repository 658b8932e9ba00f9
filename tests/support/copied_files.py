"""Local files in a store, and the folder of a node that has copies of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vane_dagster.fingerprint.local_file import FileContent, local_file
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.shipped_files import mark_needed, upload


@pytest.fixture
def root(tmp_path: Path) -> Location:
    return Location(str(tmp_path / "store"))


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    folder = tmp_path / "copies"
    folder.mkdir()
    return folder


def shipped(root: Location, path: Path) -> FileContent:
    """Put a file into a store."""
    content: FileContent = local_file(path).content()
    mark_needed(root, content.digest, content.record)
    upload(root, {blob.digest: blob.path for blob in content.blobs})
    return content


def file(path: Path, text: str = "weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
