"""Previews after edits: which instances of former code compute them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support.data import write_source
from support.edits import Project
from support.plans import plan
from vane_dagster.engine.kept_instances import with_kept_instances
from vane_dagster.planning.plan import RunPlan
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store

DEFS = """
import helpers

class Base:
    def __init__(self):
        self.loaded = True

class Model(Base):
    def __init__(self, size=1):
        super().__init__()
        self.size = size

    def __call__(self, batch):
        return {"out": [helpers.scaled(n) for n in batch["n"].to_pylist()]}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    root = tmp_path / "project"
    monkeypatch.syspath_prepend(str(root))
    made = Project(root)
    made.write(defs=DEFS, helpers="def scaled(n):\n    return 2 * n\n")
    write_source(tmp_path / "src", {"id": range(10), "n": range(10)})
    yield made
    made.forget()


def planned(tmp_path: Path, project: Project, **given: Any) -> RunPlan:
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    model = project.load("Model")
    docs.map_batches("m", model, schema={"id": "BIGINT", "out": "BIGINT"}, **given)
    found = plan(docs, Store(StoragePath(str(tmp_path / "store"))), "m")
    pool(found)  # of the code as it is now
    return found


def pool(found: RunPlan) -> str:
    return found.pool(found.pipeline["m"].spec)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("defs.py", "helpers.scaled(n) for", "1 + helpers.scaled(n) for"),
        ("defs.py", "class Base", "# a comment\n\nclass Base"),
        ("helpers.py", "2 * n", "3 * n"),
    ],
)
def test_an_edit_outside_of_the_constructors_keeps_the_instance(tmp_path, project, file, old, new):
    before = planned(tmp_path, project)
    project.edit(file, old, new)
    shown: list[Any] = []
    after = planned(tmp_path, project)
    own = pool(after)
    made = with_kept_instances(after, {pool(before)}, shown.append)
    if own == pool(before):  # the comment
        assert (made.kept, shown) == ({}, [])
        return
    assert pool(made) == pool(before)
    assert made.kept.keys() == {"m"}
    assert "instance of its former code" in shown[0].text
    fresh = with_kept_instances(planned(tmp_path, project), {pool(before), own}, shown.append)
    assert (fresh.kept, pool(fresh)) == ({}, own), "a pool of the present code comes first"


@pytest.mark.parametrize(
    ("old", "new", "given"),
    [
        ("self.size = size", "self.size = size + 1", {}),
        ("self.loaded = True", "self.loaded = 1", {}),
        ("class Model(Base)", "class Model(Base, dict)", {}),
        ("helpers.scaled(n)", "scaled(n)", {"fn_constructor_kwargs": {"size": 2}}),
        ("helpers.scaled(n)", "scaled(n)", {"gpus": 1}),
    ],
)
def test_another_constructor_or_other_arguments_do_not(tmp_path, project, old, new, given):
    before = planned(tmp_path, project)
    project.edit("defs.py", old, new)
    after = planned(tmp_path, project, **given)
    assert with_kept_instances(after, {pool(before)}, print).kept == {}
    assert pool(after) != pool(before)
