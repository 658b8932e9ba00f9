"""Files and folders that another user of the machine may leave behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vane_dagster._private_folder import MARK

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@pytest.fixture
def shared_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that all users share, as ``/tmp`` is."""
    folder = Path(tempfile.mkdtemp(prefix="vs-", dir="/tmp"))
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv(MARK, raising=False)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def acting_as_nobody() -> Iterator[None]:
    """Have what the block does to files done by another user."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def mode(path: Path) -> int:
    return path.lstat().st_mode & 0o7777


def writable_by_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def of_nobody(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)


def link(folder: Path) -> None:
    (folder.parent / "target").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "target")


def link_of_nobody(folder: Path) -> None:
    link(folder)
    os.lchown(folder, NOBODY, NOBODY)


def file(folder: Path) -> None:
    folder.write_text("")
