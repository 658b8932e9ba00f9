"""Pipelines that read Delta, Iceberg and Lance tables."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import vane_dagster as vd
from support.data import SECRET, read_stage
from support.lakes import FORMATS, Iceberg, lake, made  # noqa: F401  # fixtures
from support.results import metadata
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.lance_table import driver_options
from vane_dagster.storage.store import Store
from vane_dagster.storage.table_options import table_options


def docs(source: Any, kept: Any = ("n", "text"), keys: Any = None) -> vd.Pipeline:
    partitions = dg.StaticPartitionsDefinition(keys) if keys else None
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=10, partitions_def=partitions)
    docs.project("clean", kept)
    return docs


def ids(root: Path, partition: str | None = None) -> list[int]:
    return read_stage(root / "store", "docs", "clean", partition).sort_by("id")["id"].to_pylist()


def computed(result: Any) -> int:
    found: int = metadata(result, "clean")["fragments_computed"]
    return found


def details(root: Path) -> list[dict[str, Any]]:
    manifest = Store(Location(str(root / "store"))).in_force("docs", "clean", None)
    assert manifest is not None
    return [json.loads(span.detail) for f in manifest.fragments for span in f.spans]


def test_commits_compute_the_files_that_they_change(tmp_path, lake, compute, materialize):
    store, clean = str(tmp_path / "store"), docs(lake.source())["clean"]
    lake.append(made(range(25)))
    assert computed(materialize(docs(lake.source()), compute)) == 3
    assert computed(materialize(docs(lake.source()), compute)) == 0
    lake.append(made(range(100, 125)))
    assert computed(materialize(docs(lake.source()), compute)) == 3
    assert ids(tmp_path) == [*range(25), *range(100, 125)]
    if isinstance(lake, Iceberg):
        assert {each["snapshot"] for each in details(tmp_path)} == {lake.now()}
    step = vd.trace(clean, 103, store=store).steps[0]
    assert (step.url, step.row) == (lake.files()[1], 3)
    assert vd.trace("docs/clean", 103, store=store).steps[0].row == step.row
    assert vd.load(clean, store=store).num_rows == 50

    lake.delete([0, 3, 24])
    assert computed(materialize(docs(lake.source()), compute)) == 3
    left = [i for i in range(25) if i not in (0, 3, 24)]
    assert ids(tmp_path) == [*left, *range(100, 125)]
    step = vd.trace(clean, 20, store=store).steps[0]
    assert (step.url, step.row) == (lake.files()[0], left.index(20))
    assert vd.trace(clean, 120, store=store).steps[0].row == 20


@pytest.mark.parametrize("format", ["delta", "lance"])
def test_a_table_on_s3(tmp_path, local, materialize, s3, format):
    """Iceberg tables on S3 are read in test_publish.py."""
    lake, url = FORMATS[format](tmp_path), f"s3://lake/{uuid.uuid4().hex}/a table"
    lake.url, driver = url, table_options if format == "delta" else driver_options
    options = {"storage_options": driver(Location(url, s3))}
    by_day = {"partition_by": ["day"]} if format == "delta" else {}
    lake.append(made(range(25), day=["it's/x"] * 10 + ["b"] * 15), **options, **by_day)

    def pipeline() -> vd.Pipeline:
        text = "day = '{partition_key}' AND n <> 110"
        source = lake.source(filter=text, storage_options=s3)
        return docs(source, ("n", "day"), ["it's/x", "b"])

    materialize(pipeline(), local, partition="b")
    assert ids(tmp_path, "b") == [10, *range(12, 25)]
    lake.append(made(range(30, 33), day=["b"] * 3), **options)
    assert computed(materialize(pipeline(), local, partition="b")) == 1
    materialize(pipeline(), local, partition="it's/x")
    assert ids(tmp_path, "it's/x") == list(range(10))
    step = vd.trace(pipeline()["clean"], 24, "b", store=str(tmp_path / "store")).steps[0]
    assert step.url.startswith(f"{url}/{'day=b' if format == 'delta' else 'data'}/")
    assert step.row == 13
    assert len(pipeline().source.list_files(["b"], "here")["b"]) == 2
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
