"""Files that users' functions open."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import fsspec
import pytest

import vane_dagster as vd
from vane_dagster.errors import DefinitionError
from vane_dagster.sources.file import TaskFiles, path_of, url_of
from vane_dagster.storage.manifest import FileRecord


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


def test_the_files_of_a_task_have_the_options_of_its_source():
    source = vd.files("s3://lake/*", storage_options={"key": "k", "secret": "sssssss"})
    planned = [FileRecord(f"s3://lake/{name}", 1, "v") for name in "ab"]
    files = TaskFiles(source, planned)
    assert TaskFiles.options_of("s3://lake/a") == {}
    with files.active():
        options: list[object] = []
        thread = threading.Thread(
            target=lambda: options.append(TaskFiles.options_of("s3://lake/a"))
        )
        thread.start()
        thread.join()
        assert options == [source.storage_options]
        assert TaskFiles.options_of("s3://lake/beside") == source.storage_options
        assert TaskFiles.options_of("gs://lake/a") == {}
    assert files.used == {"s3://lake/a"}
    assert files.records() == planned[:1]
    assert TaskFiles.options_of("s3://lake/b") == {}


def test_local_files_of_rows_may_have_been_opened_by_any_code(text):
    files = TaskFiles(vd.files(str(text)), [FileRecord(f"file://{text}", 1, "v")])
    assert files.records() == []
    assert [file.url for file in files.records([str(text), None])] == [f"file://{text}"]
