"""`vane-dagster store promote`: from a branch on this machine into a store on S3."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

import dagster as dg
import fsspec
import pytest
from click.testing import CliRunner

import vane_dagster as vd
from vane_dagster.cli import definitions
from vane_dagster.cli.main import main
from vane_dagster.orchestration import assets
from vane_dagster.storage.filesystem import StoragePath

DEFINITIONS = """
import dagster as dg
import vane_dagster as vd

DAYS = ["a", "b", "c"]
rows = [{{"id": n, "day": DAYS[n % 3]}} for n in range(6)]
docs = vd.Pipeline(
    "docs", source=vd.table(rows, partition_column="day"), id="id",
    partitions_def=dg.StaticPartitionsDefinition(DAYS),
)


def label(batch, text):
    return {{"label": [f"{{text}}{{n}}" for n in batch["id"].to_pylist()]}}


labelled = docs.project("rows", ["id"]).map_batches(
    "labelled", label, schema={{"label": "VARCHAR"}}, fn_kwargs={{"text": {text!r}}}
)
labelled.write("published", {target!r})
given = {{"storage_options": {options!r}}}
resources = {{"store": vd.FragmentStore(root={root!r}, **given), "compute": vd.LocalCompute()}}
defs = dg.Definitions(assets=[docs.build_assets()], resources=resources)
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: dict[str, Any]) -> Any:
    root, target = f"s3://lake/{uuid.uuid4().hex}", f"{tmp_path}/target/{{partition_key}}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr(assets, "PIPELINES", pipelines := {})
    monkeypatch.setattr(definitions, "PIPELINES", pipelines)

    def loaded(text: str) -> Any:
        place = tmp_path / f"{text}.py"
        given = {"text": text, "target": target, "options": s3, "root": root}
        place.write_text(DEFINITIONS.format(**given))
        return definitions.Definitions(str(place), None).pipeline("docs"), root

    return loaded


def test_a_branch_on_this_machine_is_promoted_into_s3(tmp_path, load, s3, monkeypatch):
    before, root = load("old")
    production = vd.FragmentStore(root=root, storage_options=s3)
    before.run(store=production)
    held = StoragePath(root, s3).walk()
    edited, _ = load("new")
    place = str(tmp_path / "branch")
    branch = vd.FragmentStore(root=place, fallback=root, storage_options=s3)
    edited.run(["a", "b"], store=branch)
    assert StoragePath(root, s3).walk() == held
    labels = vd.load("docs/labelled", store=branch).column("label").to_pylist()
    assert sorted(labels) == ["new0", "new1", "new3", "new4", "old2", "old5"]

    (tmp_path / "home").mkdir()
    (tmp_path / "home/dagster.yaml").write_text("")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    asked = ["store", "promote", place, root, "docs"]
    monkeypatch.setitem(fsspec.config.conf, "s3", s3)
    monkeypatch.delitem(sys.modules, "old")
    done = CliRunner().invoke(main, asked)
    assert done.output.startswith("docs/labelled: 2 partitions promoted, copied 2 parts (0.0 MiB)")
    assert "Nothing is published or reported yet" in done.output
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert "docs/labelled: 0 partitions promoted, 2 promoted before, copied 0 parts" in done.output
    plan = edited.plan(["a", "b"], store=production)
    done_of = {each.stage: each.up_to_date for each in plan.stages}
    assert done_of == {"rows": 2, "labelled": 2, "published": 0}, "only published is due"
    resources = {"store": production, "compute": vd.LocalCompute()}
    with dg.DagsterInstance.get() as instance:
        given = {"resources": resources, "instance": instance, "partition_key": "a"}
        assert dg.materialize([edited.build_assets()], **given).success
        for stage in ("labelled", "published"):
            key = dg.AssetKey(["docs", stage])
            assert instance.get_materialized_partitions(key) == {"a"}

    load("other")[0].run("a", store=production)
    refused = CliRunner().invoke(main, asked)
    assert refused.exit_code == 1
    assert "docs/labelled, partition 'a': the branch began at" in refused.output
