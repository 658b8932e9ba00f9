"""Raw files: listing and grouping, the rows that name them, and how functions open them."""

from __future__ import annotations

import datetime as dt
import os
import pickle
import socket
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.ingested import listed, read, split
from vane_dagster.errors import DefinitionError, SourceError
from vane_dagster.sources.file import TaskFiles, path_of, url_of
from vane_dagster.storage.manifest import FileRecord


def write(folder, names, size=10):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)


def test_a_row_names_its_file(tmp_path):
    write(tmp_path, ["a/x.wav", "b/x.wav", "b/y.txt", "_hidden/z.wav", ".x.wav"])
    os.utime(tmp_path / "a/x.wav", (0, 1_700_000_000.5))
    found = read(vd.files(str(tmp_path)))

    assert sorted(found["path"].to_pylist()) == [
        f"{tmp_path}/{name}" for name in ("a/x.wav", "b/x.wav", "b/y.txt")
    ]
    assert found["size"].to_pylist() == [10, 10, 10]
    moment = dt.datetime.fromtimestamp(1_700_000_000.5, dt.UTC)
    assert found["modified"].to_pylist()[0] == moment
    assert found.schema == vd.files(str(tmp_path)).schema("here")


def test_the_row_of_a_path_is_found_without_reading(tmp_path):
    source = vd.files(str(tmp_path / "gone"))
    write(tmp_path, ["x"])
    (span,) = split(vd.files(str(tmp_path))).fragments[0].spans
    found = source.find([span], pa.field("path", pa.string()), f"{tmp_path}/x")
    assert found == (span, 0)
    assert source.find([span], pa.field("path", pa.string()), f"{tmp_path}/y") is None


def test_no_file_is_an_error_unless_it_is_allowed(tmp_path):
    match = r"no matching file at .*a folder that holds some, or a glob .*Check the path"
    with pytest.raises(SourceError, match=match):
        listed(vd.files(f"{tmp_path}/*.wav"))
    source = vd.files(f"{tmp_path}/*.wav", allow_empty=True)
    assert listed(source) == ()
    assert split(source).fragments == ()


def test_the_id_is_the_path_by_default():
    assert vd.Pipeline("raw", source=vd.files("/data")).id == "path"
    assert vd.Pipeline("raw", source=vd.files("/data"), id="size").id == "size"
    with pytest.raises(DefinitionError, match="id is None; expected"):
        vd.Pipeline("raw", source=vd.parquet("/data"))


@pytest.mark.parametrize(
    "source",
    [vd.files, vd.images, vd.parquet, vd.text, vd.csv, vd.json, vd.delta, vd.lance],
    ids=lambda s: s.__name__,
)
def test_a_path_object_is_a_url(tmp_path, source):
    assert source(tmp_path / "{partition_key}") == source(f"{tmp_path}/{{partition_key}}")
    with pytest.raises(DefinitionError, match=r"unknown placeholder \{day\}"):
        source(tmp_path / "{day}")


@pytest.mark.parametrize("pattern", ["", "/*", "/**", "/**/*.wav", "/sub", "/sub/*", "/pipe*"])
def test_what_is_no_regular_file_is_left_out(tmp_path, pattern):
    write(tmp_path, ["sub/a.wav"])
    for folder in (tmp_path, tmp_path / "sub"):
        os.mkfifo(folder / "pipe.wav")
        (folder / "link.wav").symlink_to(folder / "pipe.wav")
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(os.path.relpath(folder / "sock.wav"))  # its length is limited
    source = vd.files(f"{tmp_path}{pattern}", allow_empty=True)
    expected = [] if pattern == "/pipe*" else [f"file://{tmp_path}/sub/a.wav"]
    assert [file.url for file in listed(source)] == expected


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "note.txt"
    path.write_bytes("grüße\nzwei".encode())
    return path


def test_a_file_is_read_in_each_way(text):
    file = vd.File(str(text))
    assert file.read() == text.read_bytes()
    with file.open() as stream:
        assert stream.read(3) == text.read_bytes()[:3]
    with file.open("r") as lines:
        assert list(lines) == ["grüße\n", "zwei"]
    with file.to_tempfile() as copied:
        assert Path(copied.name).suffix == ".txt"
        assert Path(copied.name).read_bytes() == copied.read() == text.read_bytes()
    assert not Path(copied.name).exists()
    assert (file.name, file.suffix, file.size) == ("note.txt", ".txt", text.stat().st_size)
    assert text.exists()


def test_files_of_other_file_systems_are_read():
    with fsspec.filesystem("memory").open("/notes/a.bin", "wb") as stream:
        stream.write(b"abc")
    file = vd.File("memory://notes/a.bin")
    assert file.read() == b"abc"
    with file.open() as stream:
        assert stream.read() == b"abc"
    with file.to_tempfile() as copied:
        assert copied.read() == b"abc"


def test_files_compare_by_path_and_can_be_pickled(text):
    file = vd.File(text)
    again = pickle.loads(pickle.dumps(file))
    assert again == file == vd.File(str(text))
    assert {file} == {again}
    assert again.read() == text.read_bytes()
    assert repr(file) == f"File({str(text)!r})"


def test_credentials_are_not_shown():
    file = vd.File("s3://bucket/a", {"key": "k", "secret": "very-secret"})
    assert "very-secret" not in repr(file)


def test_wrong_use_is_refused(text):
    with pytest.raises(DefinitionError, match="path is ''; expected a local path or a URL"):
        vd.File("")
    with pytest.raises(ValueError, match="mode is 'wb'; expected 'rb' or 'r'"):
        vd.File(text).open("wb")
    with pytest.raises(FileNotFoundError):
        vd.File(text.with_name("gone")).read()


def test_paths_and_urls_convert():
    assert path_of("file:///a/b c%20.txt") == "/a/b c%20.txt"
    assert url_of("/a/b c%20.txt") == "file:///a/b c%20.txt"
    assert path_of("s3://b/a") == url_of("s3://b/a") == "s3://b/a"


def test_local_files_of_rows_may_have_been_opened_by_any_code(text):
    files = TaskFiles(vd.files(str(text)), [FileRecord(f"file://{text}", 1, "v")])
    assert files.records() == []
    assert [file.url for file in files.records([str(text), None])] == [f"file://{text}"]
