"""Branch stores: runs that read what they lack from a fallback, and their promotion."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.results import metadata
from vane_dagster.errors import PlanError, StoreError
from vane_dagster.orchestration.promote import promote

DAYS = ("mon", "tue/ä")


class Tag:
    def __init__(self, text: str = "a") -> None:
        self.text = text

    def __call__(self, batch: Any) -> Any:
        return {"tag": [f"{self.text}{n}" for n in batch["n"].to_pylist()]}


def shout(batch: Any) -> Any:
    return {"loud": [tag.upper() for tag in batch["tag"].to_pylist()]}


def docs(folder: Path, text: str = "a", last: int = 6) -> vd.Pipeline:
    rows = [{"id": n, "n": n, "day": DAYS[n % 2]} for n in range(last)]
    made = vd.Pipeline(
        "docs",
        source=vd.table(rows, partition_column="day"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(list(DAYS)),
    )
    clean = made.project("clean", ["id", "n"])
    tagged = clean.map_batches(
        "tagged", Tag, fn_constructor_kwargs={"text": text}, schema={"tag": "VARCHAR"}
    )
    loud = tagged.map_batches("loud", shout, schema={"loud": "VARCHAR"})
    loud.write("published", f"{folder}/target/{{partition_key}}")
    return made


def run(
    pipeline: vd.Pipeline, store: vd.FragmentStore, partition: str = DAYS[0], **given: Any
) -> dg.ExecuteInProcessResult:
    return dg.materialize(
        [pipeline.build_assets()],
        partition_key=partition,
        resources={"compute": vd.LocalCompute(), "store": store},
        **given,
    )


def files(folder: Path) -> Mapping[str, bytes]:
    return {
        str(each.relative_to(folder)): each.read_bytes()
        for each in sorted(folder.rglob("*"))
        if each.is_file()
    }


def computed(done: dg.ExecuteInProcessResult) -> dict[str, int]:
    stages = ("clean", "tagged", "loud", "published")
    return {stage: metadata(done, stage)["fragments_computed"] for stage in stages}


@pytest.fixture
def production(tmp_path: Path) -> vd.FragmentStore:
    store = vd.FragmentStore(root=str(tmp_path / "store"))
    docs(tmp_path).run(store=store)
    return store


@pytest.fixture
def branch(tmp_path: Path) -> vd.FragmentStore:
    return vd.FragmentStore(root=str(tmp_path / "branch"), fallback=str(tmp_path / "store"))


def test_a_branch_computes_only_what_its_edits_change(tmp_path, production, branch):
    before = files(tmp_path / "store"), files(tmp_path / "target")
    assert set(computed(run(docs(tmp_path), branch)).values()) == {0}
    assert not (tmp_path / "branch" / "docs").exists()

    edited = docs(tmp_path, "b")
    assert computed(run(edited, branch)) == {"clean": 0, "tagged": 1, "loud": 1, "published": 1}
    assert set(computed(run(edited, branch)).values()) == {0}
    assert before == (files(tmp_path / "store"), files(tmp_path / "target"))

    loud = vd.load("docs/loud", store=branch).to_pydict()
    assert sorted(loud["loud"]) == ["A1", "A3", "A5", "B0", "B2", "B4"], "one day of each"
    published = list((tmp_path / "branch/~published/docs/published/mon").glob("*.parquet"))
    assert len(published) == 1
    assert "n=0" not in str(vd.trace("docs/loud", 0, partition="mon", store=branch))


def test_what_is_promoted_is_done_published_and_reported(tmp_path, production, branch, monkeypatch):
    edited = docs(tmp_path, "b")
    run(edited, branch)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    promoted = promote(branch, production, "docs", edited)
    assert [(each.stage, each.partition, len(each.parts)) for each in promoted] == [
        ("tagged", "mon", 1),
        ("loud", "mon", 1),
    ]
    with dg.DagsterInstance.get() as instance:
        reported = {
            key.path[-1]
            for key in instance.all_asset_keys()
            if instance.get_materialized_partitions(key) == {"mon"}
        }
        assert reported == {"tagged", "loud", "published"}
    monkeypatch.delenv("DAGSTER_HOME")
    assert set(computed(run(edited, production)).values()) == {0}
    (file,) = (tmp_path / "target/mon").glob("*.parquet")
    assert pq.read_table(file).column("loud").to_pylist() == ["B0", "B2", "B4"]
    tagged = production.open().in_force("docs", "tagged", "mon")
    assert set(tagged.upstream) == {"clean"}
    loud = production.open().in_force("docs", "loud", "mon")
    assert loud.upstream == {
        "tagged": str(production.open().latest("docs", "tagged", ["mon"])["mon"])
    }

    assert {len(each.parts) for each in promote(branch, production, "docs", edited)} == {0}
    edited = docs(tmp_path, "c")  # the branch goes on
    run(edited, branch)
    promote(branch, production, "docs", edited)
    assert set(computed(run(edited, production)).values()) == {0}


def test_promotion_is_refused_if_another_version_is_in_force(tmp_path, production, branch):
    run(docs(tmp_path, "b"), branch)
    run(docs(tmp_path, "c"), production)
    before = files(tmp_path / "store")
    with pytest.raises(
        StoreError, match=r"docs/tagged, partition 'mon': the branch was made from "
    ):
        promote(branch, production, "docs")
    assert before == files(tmp_path / "store")


def test_promotion_is_refused_for_other_definitions(tmp_path, production, branch):
    run(docs(tmp_path, "b"), branch)
    before = files(tmp_path / "store")
    with pytest.raises(PlanError, match="not up to date with the definitions"):
        promote(branch, production, "docs", docs(tmp_path, "c"))
    assert before == files(tmp_path / "store")
