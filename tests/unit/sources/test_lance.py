"""Lance sources as they are declared, and how a table is cut."""

from __future__ import annotations

import datetime
import functools
import json
import shutil

import lance
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.ingested import read
from vane_dagster.errors import DefinitionError
from vane_dagster.sources import FileSpan, FragmentRule


def test_a_version_is_no_time():
    with pytest.raises(DefinitionError, match="version is a datetime; expected the number of a"):
        vd.lance("table", version=datetime.datetime(2026, 1, 1))  # type: ignore[arg-type]  # the error is tested


def test_rows_are_cut_evenly_and_read_by_number(tmp_path):
    url = str(tmp_path / "t")
    table = pa.table({"id": range(100), "text": ["x" * 10] * 100})
    lance.write_dataset(table, url, max_rows_per_file=60)
    lance.dataset(url).delete("id % 10 = 3")
    source = vd.lance(url, filter="id <> 7")
    files = source.list_files([None], "here")[None]
    assert [file.url for file in files] == sorted({f.url for f in files}, key=files_in(url).index)
    found = source.split(files, FragmentRule(20), "here")
    assert [f.stop - f.start for f in found.fragments] == [17, 18, 18, 18, 18]
    ids = read(source, FragmentRule(20), columns=["id"])["id"].to_pylist()
    assert ids == [i for i in range(100) if i % 10 != 3 and i != 7]
    tiny = source.split(files, FragmentRule(1000, bytes=300), "here")
    assert len(tiny.fragments) > 5


def files_in(url: str) -> list[str]:
    return [f"{url}/data/{f.metadata.files[0].path}" for f in lance.dataset(url).get_fragments()]


def version_of(url, **given):
    (file,) = vd.lance(url, **given).list_files([None], "here")[None]
    return file.version


def test_identity_is_files_deletions_columns_and_filter(tmp_path):
    url = str(tmp_path / "t")
    lance.write_dataset(pa.table({"id": range(10), "n": range(10)}), url)
    version = functools.partial(version_of, url)
    first, few, filtered = version(), version(columns=["id"]), version(filter="n < 5")
    assert len({first, few, filtered, version(filter="n < 6")}) == 4
    lance.dataset(url).add_columns({"m": "n + 1"})
    assert version() != first
    assert version(columns=["id"]) == few
    lance.dataset(url).delete("id = 9")
    assert version(columns=["id"]) != few
    assert version(version=1) == first


def test_a_name_that_is_given_to_another_column_changes_the_identity(tmp_path):
    url = str(tmp_path / "t")
    lance.write_dataset(pa.table({"id": range(3), "raw": ["a"] * 3, "clean": ["b"] * 3}), url)
    version = functools.partial(version_of, url)
    given = ({"columns": ["raw"]}, {"columns": ["id"], "filter": "RAW <> ''"}, {"columns": ["id"]})
    read, tested, other = (version(**each) for each in given)
    lance.dataset(url).alter_columns({"path": "raw", "name": "former"})
    lance.dataset(url).alter_columns({"path": "clean", "name": "raw"})
    assert version(**given[0]) != read
    assert version(**given[1]) != tested
    assert version(**given[2]) == other


def test_rows_of_a_version_that_is_gone(tmp_path):
    url = str(tmp_path / "t")
    lance.write_dataset(pa.table({"id": range(10)}), url)
    source = vd.lance(url)
    files = source.list_files([None], "here")[None]
    (fragment,) = source.split(files, FragmentRule(100), "here").fragments
    assert json.loads(fragment.detail)["version"] == 1
    schema = pa.schema([("id", pa.int64())])
    assert source.current(files[0]) == files[0]
    lance.dataset(url).delete("id = 5")
    lance.dataset(url).cleanup_old_versions(datetime.timedelta(0), delete_unverified=True)
    words = "version 1 of .* If the file is missing, cleanup_old_versions has deleted"
    with pytest.raises(vd.errors.SourceError, match=words):
        source.read(fragment, schema, "here")

    shutil.rmtree(url)
    lance.write_dataset(pa.table({"id": range(10, 20)}), url)
    with pytest.raises(vd.errors.SourceError, match=words):  # another table's version 1
        source.read(fragment, schema, "here")
    with pytest.raises(vd.errors.SourceError):
        source.find([FileSpan(files[0].url, 0, 1 << 40)], schema.field(0), 17)
    with pytest.raises(FileNotFoundError):
        source.current(files[0])
