"""Listing and grouping of raw files, and the rows that name them."""

from __future__ import annotations

import datetime as dt
import os
import socket

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.ingested import listed, read, split
from vane_dagster.errors import DefinitionError, SchemaError, SourceError
from vane_dagster.pipeline.stage_kind import SOURCE


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


def test_a_function_that_reads_no_column_of_files_gets_a_hint(tmp_path):
    def size(content) -> int:
        return len(content)

    raw = vd.Pipeline("raw", source=vd.files(tmp_path))
    stage = raw.map("sizes", size)
    given = {SOURCE: vd.files(tmp_path).columns}
    with pytest.raises(SchemaError, match=r"'content'.*annotate it as vd\.File"):
        stage.spec.output_schema(raw, given)
