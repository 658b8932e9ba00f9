"""Two runs that publish the same partition at one time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb

import vane_dagster as vd
from support.data import write_source
from support.results import failure
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


def test_publisher_whose_files_were_taken_away_says_so_and_the_next_run_repairs_it(
    tmp_path, local, materialize, monkeypatch
):
    """The other run publishes while this one cleans up."""
    from vane_dagster.storage.publish.parquet import FolderPublisher

    write_source(tmp_path / "src", {"id": range(10)})
    retire = FolderPublisher.retire

    def raced(*args: Any) -> None:
        monkeypatch.undo()
        materialize(_publishing(tmp_path, "id < 8"), local)
        retire(*args)

    monkeypatch.setattr(FolderPublisher, "retire", raced)
    result = materialize(_publishing(tmp_path, "id < 5"), local, raises=False)
    assert "Another run may have published the partition at the same time" in failure(result)

    materialize(_publishing(tmp_path, "id < 8"), local)
    assert _published(tmp_path) == list(range(8))


def _published(tmp_path: Path) -> list[int]:
    rows = duckdb.sql(f"SELECT id FROM read_parquet('{tmp_path}/out/*.parquet') ORDER BY id")
    return [id for (id,) in rows.fetchall()]
