"""Files that travel to the workers by content, on subprocesses, on Ray, and through S3."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import pytest

import vane_dagster as vd
from support.copied_files import copies, file, root, shipped  # noqa: F401  # fixtures
from support.data import read_stage, write_source
from support.results import metadata
from vane_dagster.engine import executor
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.shipped_files import FILES
from vane_dagster.worker.local_copies import local_copy
from vane_dagster.worker.node_files import UNUSED_SECONDS

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
    monkeypatch.delenv("VANE_TEST_MODELS")  # workers of `LocalCompute` inherit the environment
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
    compute, models, tmp_path, materialize, monkeypatch
):
    with monkeypatch.context() as patch:
        hidden(patch, models)
        done = materialize(declared(monkeypatch), compute)
    assert metadata(done, "scaled")["fragments_computed"] == 1
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
    checked = dg.materialize(
        [declared(monkeypatch, "moved").build_assets()],
        selection=dg.AssetSelection.checks(
            dg.AssetCheckKey(dg.AssetKey(["docs", "scaled"]), "reproducible")
        ),
        resources={"compute": compute, "store": vd.FragmentStore(root=str(tmp_path / "store"))},
    )
    (found,) = checked.get_asset_check_evaluations()
    assert found.passed, found.description
    assert "3 rows computed again" in (found.description or "")


HOLD = """
import sys
from pathlib import Path
from vane_dagster.storage.filesystem import Location
from vane_dagster.worker.local_copies import local_copy

for digest in sys.argv[3:]:
    print(local_copy(digest, Location(sys.argv[1]), Path(sys.argv[2])), flush=True)
sys.stdin.read()
"""


def worker(root: Location, copies: Path, *digests: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, root.url, str(copies), *digests]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_what_no_process_uses_is_deleted_after_a_while(root, copies, tmp_path):
    used, unused, recent, new = (
        shipped(root, file(tmp_path / name / "model.pt", name)).digest
        for name in ("used", "unused", "recent", "new")
    )
    with worker(root, copies, unused, recent) as ended, worker(root, copies, used) as living:
        assert ended.stdout is not None
        assert living.stdout is not None
        places = [ended.stdout.readline(), ended.stdout.readline(), living.stdout.readline()]
        assert all(Path(place.strip()).exists() for place in places)
        ended.communicate()
        then = time.time() - UNUSED_SECONDS - 60
        for digest in (used, unused):
            os.utime(copies / f"{digest}.used", (then, then))
        (copies / ".cleaned").unlink()
        local_copy(new, root, copies)
        living.communicate()
    kept = {path.name for path in copies.iterdir() if path.is_dir() and path.name != ".partial"}
    assert kept == {used, recent, new}


KILLED = """
import os, signal, sys
from pathlib import Path
from vane_dagster.storage.filesystem import Location
from vane_dagster.worker import local_copies

def killed(root, content, path):
    path.parent.mkdir(parents=True)
    path.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

local_copies._fetch = killed
local_copies.local_copy(sys.argv[3], Location(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("following", ["same", "other"])
def test_what_a_killed_process_has_copied_is_deleted_by_the_next(root, copies, tmp_path, following):
    digest = shipped(root, file(tmp_path / "same" / "model.pt", "same")).digest
    command = [sys.executable, "-c", KILLED, root.url, str(copies), digest]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert len([*(copies / ".partial").iterdir()]) == 1
    (copies / ".cleaned").unlink()
    following = shipped(root, file(tmp_path / following / "model.pt", following)).digest
    local_copy(following, root, copies)
    assert [path.name for path in copies.glob("?" * 64)] == [following]
    assert not [*(copies / ".partial").iterdir()]
