"""Copies of users' files on a node: once, whole and verified."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from vane_dagster.errors import StoreError
from vane_dagster.fingerprint.local_file import FileContent, local_file
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.shipped_files import FILES, RECORD, mark_needed, upload
from vane_dagster.worker import local_copies, node_files
from vane_dagster.worker.local_copies import local_copy


@pytest.fixture
def root(tmp_path: Path) -> StoragePath:
    return StoragePath(str(tmp_path / "store"))


@pytest.fixture
def copies(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "copies"
    folder.mkdir()
    monkeypatch.setattr(local_copies, "worker_folder", lambda kind: folder)
    return folder


def shipped(root: StoragePath, path: Path) -> FileContent:
    content: FileContent = local_file(path).content()
    mark_needed(root, content.digest, content.record)
    upload(root, {blob.digest: blob.path for blob in content.blobs})
    return content


def file(path: Path, text: str = "weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_folder_is_copied_whole_and_again_if_a_file_is_gone(root, copies, tmp_path):
    file(tmp_path / "tokenizer" / "vocab.txt")
    file(tmp_path / "tokenizer" / "inner" / "same.txt")
    content = shipped(root, tmp_path / "tokenizer")
    path = Path(local_copy(content.digest, root))
    assert path.name == "tokenizer"
    (path / "vocab.txt").unlink()
    assert local_copy(content.digest, root) == str(path)
    assert (path / "vocab.txt").read_text() == (path / "inner" / "same.txt").read_text()
    assert [p.name for p in copies.glob("?" * 64)] == [content.digest]


def overwrite(path: Path) -> None:
    path.chmod(0o600)
    path.write_text("WEIGHTS")
    path.chmod(0o400)


def replace_by_a_file(path: Path) -> None:
    file(path.with_name("other"), "WEIGHTS").replace(path)


def replace_by_a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(file(path.parent.parent / "other", "WEIGHTS"))


@pytest.mark.parametrize("change", [overwrite, replace_by_a_file, replace_by_a_link])
def test_a_file_that_user_code_has_changed_is_copied_again(root, copies, tmp_path, change):
    content = shipped(root, file(tmp_path / "model.pt"))
    path = Path(local_copy(content.digest, root))
    change(path)
    assert path.stat().st_size == len("weights")
    assert local_copy(content.digest, root) == str(path)
    assert path.read_text() == "weights"
    assert not path.is_symlink()


def test_a_copy_that_nobody_wrote_to_is_not_read_again(root, copies, tmp_path, monkeypatch):
    content = shipped(root, file(tmp_path / "model.pt"))
    path = Path(local_copy(content.digest, root))
    read: list[Path] = []
    digest_of = local_copies._sha256
    monkeypatch.setattr(local_copies, "_sha256", lambda path: read.append(path) or digest_of(path))
    local_copy(content.digest, root)
    assert read == []
    path.touch()
    for _ in range(2):
        local_copy(content.digest, root)
    assert len(read) == 1, "it was copied again, once"


def test_a_damaged_content_is_refused_and_deleted(root, copies, tmp_path):
    content = shipped(root, file(tmp_path / "model.pt"))
    stored = Path(root.url, FILES, content.blobs[0].digest)
    stored.write_text("WEIGHTS")
    with pytest.raises(StoreError, match=r"damaged and was deleted. Run again"):
        local_copy(content.digest, root)
    assert not stored.exists()
    assert [*copies.glob("?" * 64), *copies.glob(".partial/*")] == []
    with pytest.raises(StoreError, match=r"is gone: it was deleted after"):
        local_copy(content.digest, root)


def test_a_record_is_verified_too(root, copies, tmp_path):
    content = shipped(root, file(tmp_path / "model.pt"))
    record = Path(root.url, FILES, content.digest + RECORD)
    record.write_bytes(record.read_bytes() + b" ")
    with pytest.raises(StoreError, match="does not match the digest in its name"):
        local_copy(content.digest, root)
    record.unlink()
    with pytest.raises(StoreError, match="is gone"):
        local_copy(content.digest, root)


def test_what_no_process_uses_is_deleted_after_a_while(root, copies, tmp_path):
    """A process holds the lock of a copy until it ends."""
    used, unused, recent, new = (
        shipped(root, file(tmp_path / name / "model.pt", name)).digest
        for name in ("used", "unused", "recent", "new")
    )
    for digest in (used, unused, recent):
        local_copy(digest, root)
    for digest in (unused, recent):
        os.close(node_files._in_use.pop(copies / f"{digest}.used"))
    then = time.time() - node_files.UNUSED_SECONDS - 60
    for digest in (used, unused):
        os.utime(copies / f"{digest}.used", (then, then))
    (copies / ".cleaned").unlink()
    local_copy(new, root)
    assert {path.name for path in copies.glob("?" * 64)} == {used, recent, new}


def test_a_folder_is_listed_once_however_much_is_deleted(tmp_path, monkeypatch):
    for name in map(str, range(20)):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.used").touch()
        os.utime(tmp_path / f"{name}.used", (0, 0))
    listed, glob = list[Path](), Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, what: listed.append(path) or glob(path, what))
    node_files._remove_unused(tmp_path, node_files.UNUSED_SECONDS)
    assert listed == [tmp_path / ".partial", tmp_path]
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"} == {".cleaned"}


@pytest.mark.parametrize("following", ["same", "other"])
def test_what_a_killed_process_has_copied_is_deleted_by_the_next(root, copies, tmp_path, following):
    digest = shipped(root, file(tmp_path / "same" / "model.pt", "same")).digest
    killed = node_files.new_entry(copies, digest).__enter__()
    file(killed / "new" / "content" / "model.pt", "half")
    assert [*(copies / ".partial").iterdir()] == [killed]
    following = shipped(root, file(tmp_path / following / "model.pt", following)).digest
    local_copy(following, root)
    assert [path.name for path in copies.glob("?" * 64)] == [following]
    assert not [*(copies / ".partial").iterdir()]
