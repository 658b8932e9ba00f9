"""Which errors of storage may pass, and what of a part is damaged."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.damage import (
    blank,
    cut,
    flip,
    quick,  # noqa: F401  # fixtures
)
from vane_dagster.errors import DamagedPartError
from vane_dagster.retries import is_transient_storage_error, with_retries
from vane_dagster.storage.damage import damage_of, read_whole
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.part_file import PartTarget, read_part, write_part
from vane_dagster.storage.store import read_part_info

# Errors that may pass


class Flaky:
    """Raises what it is given, one after the other, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def s3_error(code: str, status: int) -> Exception:
    """As s3fs raises it."""
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate_boto_error(ClientError(response, "PutObject"))


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (ConnectionResetError("reset"), True),
        (TimeoutError(), True),
        (s3_error("SlowDown", 503), True),
        (s3_error("InternalError", 500), True),
        (s3_error("AccessDenied", 403), False),
        (s3_error("NoSuchBucket", 404), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (FileNotFoundError("gone"), False),
        (ValueError("nonsense"), False),
    ],
)
@pytest.mark.usefixtures("quick")
def test_which_errors_may_pass(error, passing):
    assert is_transient_storage_error(error) is passing
    action = Flaky(error)
    if passing:
        assert with_retries(action) == "done"
        assert action.calls == 2
    else:
        with pytest.raises(type(error)):
            with_retries(action)
        assert action.calls == 1


def test_a_file_system_without_atomic_writes_keeps_no_part_of_a_file():
    """Where a file is written under another name first, that one is removed."""

    class Limited(fsspec.get_filesystem_class("memory")):
        protocol = "limited"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        def pipe_file(self, path: str, value: bytes, **given: Any) -> None:
            super().pipe_file(path, value[:10], **given)
            if len(value) > 10:
                raise OSError(errno.ENOSPC, "No space left on device")

    fsspec.register_implementation("limited", Limited, clobber=True)
    folder = StoragePath("limited://lake")
    folder.write("f", b"before")
    with pytest.raises(vd.errors.StoreError, match="The disk is full"):
        folder.write("f", bytes(100))
    assert folder.entries().keys() == {"f"}
    assert folder.read("f") == b"before"


# Damaged parts


@pytest.mark.parametrize("harm", [flip, cut, blank, Path.unlink])
def test_a_damaged_part_is_told(harm, tmp_path):
    folder = StoragePath(str(tmp_path / "parts"))
    table = pa.table({"id": range(1000), "y": [n * 0.7 for n in range(1000)]})
    info = write_part(table, PartTarget(folder, "a" * 40, "id"))
    assert read_part(folder, info.name) == table
    assert damage_of(folder, info.name) is None
    harm(tmp_path / "parts" / info.name)
    with pytest.raises(DamagedPartError, match=info.name) as raised:
        read_part(folder, info.name)
    assert raised.value.part == info.name
    assert info.name in str(damage_of(folder, info.name))
    if harm is not flip:
        with pytest.raises(DamagedPartError, match=info.name):
            read_part_info(folder, info.name)
    else:
        assert read_part(folder, info.name, ["id"])["id"] == table["id"]


def test_storage_that_fails_is_no_damage(tmp_path, monkeypatch, quick):
    """A part is not given up because it could not be fetched."""
    folder = StoragePath(f"memory://{tmp_path.name}")
    info = write_part(pa.table({"id": [1]}), PartTarget(folder, "a" * 40, "id"))
    opened = type(folder.fs).open
    fails = Flaky(ConnectionResetError("reset"), TimeoutError("late"))

    def flaky(self: Any, *args: Any, **given: Any) -> Any:
        fails()
        return opened(self, *args, **given)

    monkeypatch.setattr(type(folder.fs), "open", flaky)
    assert read_part(folder, info.name).num_rows == 1
    assert fails.calls == 3
    fails.errors = [PermissionError(errno.EACCES, "no")]
    with pytest.raises(vd.errors.StoreError, match="Permission is denied") as raised:
        read_part(folder, info.name)
    assert not isinstance(raised.value, DamagedPartError)


def test_local_parts_are_read_without_python(tmp_path):
    """A thread of Arrow that reads a Python file needs the GIL; at exit, that ended the process."""
    (tmp_path / "part").write_bytes(b"x")
    assert isinstance(
        read_whole(StoragePath(str(tmp_path)), "part", lambda file: file), pa.NativeFile
    )
