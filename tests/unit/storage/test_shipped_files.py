"""Local files of arguments in a store: what is copied, what is needed, what is deleted."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from vane_dagster.errors import StoreError
from vane_dagster.fingerprint.local_file import FileContent, local_file
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.gc import GcPolicy, GcReport, collect
from vane_dagster.storage.shipped_files import (
    FILES,
    RECORD,
    StoredFile,
    discard,
    mark_needed,
    missing_contents,
    parse_record,
    upload,
)
from vane_dagster.storage.store import Store

DAY = 86_400.0


@pytest.fixture
def root(tmp_path: Path) -> StoragePath:
    return StoragePath(str(tmp_path / "store"))


def shipped(root: StoragePath, path: Path, text: str) -> FileContent:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    content = local_file(path).content()
    mark_needed(root, content.digest, content.record)
    sizes = {blob.digest: blob.size for blob in content.blobs}
    missing = missing_contents(root, sizes)
    upload(root, {blob.digest: blob.path for blob in content.blobs if blob.digest in missing})
    return content


def stored(root: StoragePath) -> set[str]:
    return set(os.listdir(Path(root.url) / FILES))


def test_a_content_is_stored_once(root, tmp_path):
    first = shipped(root, tmp_path / "a" / "model.pt", "weights")
    other = shipped(root, tmp_path / "b" / "other.pt", "weights")
    content = hashlib.sha256(b"weights").hexdigest()
    assert parse_record(first.record, "url") == StoredFile("model.pt", {"": (content, 7)})
    assert stored(root) == {content, first.digest + RECORD, other.digest + RECORD}
    assert missing_contents(root, {content: 7}) == []
    assert missing_contents(root, {content: 8}) == [content], "cut off"
    discard(root, [content])
    assert missing_contents(root, {content: 7}) == [content]


SHA = "0" * 64


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"files": {}}, "not readable"),
        ({"name": "../x", "files": {"": [SHA, 1]}}, "outside"),
        ({"name": "x", "files": {"a/../../b": [SHA, 1]}}, "outside"),
        ({"name": "x", "files": {"/etc/b": [SHA, 1]}}, "outside"),
        ({"name": "x", "files": {"": ["../other", 1]}}, "sha256"),
    ],
)
def test_records_that_no_release_writes_are_refused(record, message):
    with pytest.raises(StoreError, match=message):
        parse_record(json.dumps(record).encode(), "url")


def collected(root: StoragePath, dry_run: bool = False) -> GcReport:
    policy = GcPolicy(time.time(), 7 * DAY, DAY, dry_run)
    (report,) = collect(Store(root), policy)
    assert report.stage == FILES
    return report


def age(root: StoragePath, name: str, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(Path(root.url) / FILES / name, (then, then))


def test_what_no_recent_run_has_needed_is_deleted(root, tmp_path):
    old = shipped(root, tmp_path / "old" / "model.pt", "old")
    both = shipped(root, tmp_path / "both" / "model.pt", "shared")
    young = shipped(root, tmp_path / "young" / "other.pt", "shared")
    for name in stored(root) - {young.digest + RECORD}:
        age(root, name, 9)
    assert collected(root, dry_run=True).files.keys() == {
        f"{root.url}/{FILES}/{name}"
        for name in (old.digest + RECORD, old.blobs[0].digest, both.digest + RECORD)
    }
    assert len(collected(root).files) == 3
    assert stored(root) == {young.digest + RECORD, young.blobs[0].digest}
    assert collected(root).files == {}
