"""Listings of files: links, and versions of file systems."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import vane_dagster as vd
from vane_dagster.errors import SourceError
from vane_dagster.sources.files import file_record


def listed(url: str) -> object:
    return vd.parquet(url).list_files([None], "here")[None]


def write(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"1")


@pytest.mark.parametrize("kind", ["to a parent", "two links"])
def test_a_cycle_of_links_is_an_error(kind, tmp_path):
    src = tmp_path / "src"
    write(src / "a" / "x.parquet", src / "b" / "y.parquet")
    if kind == "to a parent":
        (src / "a" / "up").symlink_to(src)
    else:
        (src / "a" / "to_b").symlink_to(src / "b")
        (src / "b" / "to_a").symlink_to(src / "a")
    error = listed(str(src))
    assert isinstance(error, SourceError)
    assert "Too many levels of symbolic links" in str(error)
    assert str(error).endswith("remove broken and circular links")


@pytest.mark.parametrize("count", [2, 70])
def test_a_cycle_of_links_or_a_name_that_is_not_utf_8_fails_its_partition_only(count, tmp_path):
    keys = [str(number) for number in range(count)]
    write(*(tmp_path / key / "x.parquet" for key in keys))
    (tmp_path / "0" / "up").symlink_to(tmp_path / "0")
    write(Path(os.fsdecode(bytes(tmp_path / "1" / "caf") + b"\xe9.parquet")))
    source = vd.parquet(f"{tmp_path}/{{partition_key}}")
    cycle, name, *others = source.list_files(keys, "here").values()
    assert isinstance(cycle, SourceError)
    assert "Too many levels of symbolic links" in str(cycle)
    assert isinstance(name, SourceError)
    assert str(name).endswith(r"caf\udce9.parquet' is not UTF-8; rename the file")
    assert [len(files) for files in others] == [1] * (count - 2)


@pytest.mark.parametrize("pattern", ["", "/*.parquet", "/**/*.parquet", "/x.parquet"])
@pytest.mark.parametrize("root", ["{}//", "file://{}///", "{}/./"])
def test_a_root_with_more_slashes_lists_the_same(root, pattern, tmp_path):
    keys = [str(number) for number in range(70)]
    write(*(tmp_path / key / "x.parquet" for key in keys))
    source = vd.parquet(f"{root.format(tmp_path)}{{partition_key}}{pattern}")
    alone, together = source.list_files(keys[:1], "here"), source.list_files(keys, "here")
    assert [len(files) for files in together.values()] == [1] * 70
    assert together["0"] == alone["0"]


@pytest.mark.parametrize("pattern", ["", "/**/*.parquet", "/*", "/*.parquet"])
def test_a_link_to_nothing_is_an_error(pattern, tmp_path):
    write(tmp_path / "x.parquet")
    (tmp_path / "gone.parquet").symlink_to("/nowhere")
    error = listed(f"{tmp_path}{pattern}")
    assert isinstance(error, SourceError)
    assert "gone.parquet'. Check the URL and the credentials, and remove broken" in str(error)


class _Unversioned(MemoryFileSystem):
    """A file system that knows names and sizes alone, as some HTTP servers do."""

    protocol = "unversioned"
    cachable = False

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        found = super().info(path, **kwargs)
        return {name: found[name] for name in ("name", "size", "type")}


def test_files_without_a_version_are_refused():
    fs = _Unversioned()
    with fs.open("/plain.txt", "wb") as stream:
        stream.write(b"x")
    with pytest.raises(SourceError, match=r"has no ETag, modification time or size.*Copy"):
        file_record(fs, fs.info("/plain.txt"))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def website(tmp_path) -> Iterator[str]:
    (tmp_path / "day").mkdir()
    (tmp_path / "day" / "a.txt").write_text("one")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["day/a.txt", "day", "day/*.txt"])
def test_files_of_a_web_server_are_listed(path, website):
    source = vd.files(f"{website}/{path}")
    (file,) = source.required(source.list_files([None], "here")[None], None, "here")
    assert (file.url, file.size) == (f"{website}/day/a.txt", 3)
    assert file.version
