"""Files that travel to the workers by content."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import metadata
from vane_dagster.engine import executor
from vane_dagster.storage.shipped_files import FILES

# Declared beside the functions, so workers import the declarations too, where no file exists.
DECLARED = """
import os
from pathlib import Path

import vane_dagster as vd

FOLDER = os.environ.get("VANE_TEST_MODELS", "/gone")


class Scaled:
    def __init__(self, options):
        self.path = options["weights"]
        self.factor = int(Path(self.path).read_text())

    def __call__(self, batch, labels):
        names = Path(labels, "names", "all.txt").read_text().split()
        ids = batch["id"].to_pylist()
        return {
            "label": [names[n * self.factor % len(names)] for n in ids],
            "paths": [f"{self.path} {labels}" for _ in ids],
        }


docs = vd.Pipeline("docs", source=vd.parquet(os.environ.get("VANE_TEST_SOURCE", "/gone")), id="id")
docs.map_batches(
    "scaled", Scaled, schema={"label": "VARCHAR", "paths": "VARCHAR"},
    fn_constructor_kwargs={"options": {"weights": vd.local_file(f"{FOLDER}/weights.txt")}},
    fn_kwargs={"labels": vd.local_file(f"{FOLDER}/labels/")}, concurrency=1,
    asset=vd.Asset(checks=[vd.checks.Reproducible(rows=3)]),
)
assets = docs.build_assets()
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of files that only the driver can find: by a relative path, and not for long."""
    write_source(tmp_path / "src", {"id": [1, 2, 3]})
    (tmp_path / "models" / "labels" / "names").mkdir(parents=True)
    (tmp_path / "models" / "weights.txt").write_text("1")
    (tmp_path / "models" / "labels" / "names" / "all.txt").write_text("zero one two three")
    (tmp_path / "scaled_labels.py").write_text(DECLARED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VANE_TEST_SOURCE", str(tmp_path / "src"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path / "models"
    sys.modules.pop("scaled_labels", None)


def declared(monkeypatch: pytest.MonkeyPatch, folder: str = "models") -> vd.Pipeline:
    monkeypatch.setenv("VANE_TEST_MODELS", folder)
    sys.modules.pop("scaled_labels", None)
    module: ModuleType = importlib.import_module("scaled_labels")
    monkeypatch.delenv("VANE_TEST_MODELS")
    found: vd.Pipeline = module.docs
    return found


def hidden(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Hide a folder while a run computes: from when its workers are about to be leased."""
    waves = executor.plan_waves

    def plan_waves(*given: Any) -> Any:
        folder.rename(folder.with_suffix(".hidden"))
        return waves(*given)

    monkeypatch.setattr(executor, "plan_waves", plan_waves)


def test_workers_that_cannot_see_a_file_get_its_content(
    cluster, models, tmp_path, materialize, monkeypatch
):
    compute = vd.RayCompute(cluster=cluster)
    with monkeypatch.context() as patch:
        hidden(patch, models)
        done = materialize(declared(monkeypatch), compute)
    assert metadata(done, "scaled")["fragments_computed"] == 1
    executed = {each.check_name for each in done.get_asset_check_evaluations()}
    assert executed == {"rows", "quality"}, "the other check is executed alone"
    rows = read_stage(tmp_path / "store", "docs", "scaled")
    assert rows["label"].to_pylist() == ["one", "two", "three"]
    (paths,) = set(rows["paths"].to_pylist())
    for path, name in zip(paths.split(), ["weights.txt", "labels"]):
        assert Path(path).name == name
        assert not Path(path).is_relative_to(tmp_path)

    models.with_suffix(".hidden").rename(tmp_path / "moved")
    done = materialize(declared(monkeypatch, "moved"), compute)
    assert metadata(done, "scaled")["fragments_computed"] == 0

    (tmp_path / "moved" / "weights.txt").write_text("2")
    materialize(declared(monkeypatch, "moved"), compute)
    labels = read_stage(tmp_path / "store", "docs", "scaled")["label"].to_pylist()
    assert labels == ["two", "zero", "two"]

    (tmp_path / "moved" / "labels" / "names" / "all.txt").write_text("a b c d e f g")
    materialize(declared(monkeypatch, "moved"), compute)
    labels = read_stage(tmp_path / "store", "docs", "scaled")["label"].to_pylist()
    assert labels == ["c", "e", "g"]
    assert len(os.listdir(tmp_path / "store" / FILES)) == 8  # 4 contents and their records

    shutil.rmtree(tmp_path / "store" / FILES)
    docs = declared(monkeypatch, "moved")
    select = dg.AssetSelection.checks(dg.AssetCheckKey(docs["scaled"].key, "reproducible"))
    checked = materialize(docs, compute, select=select)
    (found,) = checked.get_asset_check_evaluations()
    assert found.passed, found.description
    assert "3 rows computed again" in (found.description or "")
    shown = {name: value.value for name, value in found.metadata.items()}
    assert (shown["rows"], shown["differing"]) == (3, 0)
    assert shown["code_changed"] is False
    assert not checked.get_asset_materialization_events()
