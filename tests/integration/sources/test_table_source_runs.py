"""Pipelines that read Delta, Iceberg and Lance tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import vane_dagster as vd
from support.data import read_stage
from support.lakes import Iceberg, lake, made  # noqa: F401  # fixtures
from support.results import metadata
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store


def docs(source: Any) -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=10)
    docs.project("clean", ["n", "text"])
    return docs


def ids(root: Path) -> list[int]:
    return read_stage(root / "store", "docs", "clean").sort_by("id")["id"].to_pylist()


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
