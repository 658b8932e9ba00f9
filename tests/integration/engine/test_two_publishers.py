"""Two runs that publish the same partition at one time."""

from __future__ import annotations

from pathlib import Path

import duckdb

import vane_dagster as vd
from support.data import write_source
from vane_dagster.storage.manifest import Manifest, ManifestName
from vane_dagster.storage.store import Store


def _publishing(tmp_path: Path, where: str) -> vd.Pipeline:
    pipeline = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    pipeline.project("clean", ["id"], where=where).write("published", str(tmp_path / "out"))
    return pipeline


def test_of_two_publishers_the_later_manifest_wins(tmp_path, local, materialize, monkeypatch):
    """The other run publishes between this one's manifest and its cleaning up."""
    write_source(tmp_path / "src", {"id": range(10)})
    commit = Store.commit

    def overtaken(store: Store, manifest: Manifest) -> ManifestName:
        name = commit(store, manifest)
        if manifest.stage == "published":
            monkeypatch.undo()
            materialize(_publishing(tmp_path, "id < 8"), local)
        return name

    monkeypatch.setattr(Store, "commit", overtaken)
    materialize(_publishing(tmp_path, "id < 5"), local)

    assert _published(tmp_path) == list(range(8))


def _published(tmp_path: Path) -> list[int]:
    rows = duckdb.sql(f"SELECT id FROM read_parquet('{tmp_path}/out/*.parquet') ORDER BY id")
    return [id for (id,) in rows.fetchall()]
