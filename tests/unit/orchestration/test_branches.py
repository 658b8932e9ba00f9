"""Branch stores: runs that read what they lack from a fallback, and their promotion."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import vane_dagster as vd
from support.data import partitioned, write_source
from support.iceberg_tables import catalog_in, opened
from support.in_process import InProcessCompute
from support.promotions import promote
from vane_dagster.errors import PlanError, StoreError

DAYS = ("mon", "tue/ä")


class Tag:
    def __init__(self, text: str = "a") -> None:
        self.text = text

    def __call__(self, batch: Any) -> Any:
        return {"tag": [f"{self.text}{n}" for n in batch["n"].to_pylist()]}


def shout(batch: Any) -> Any:
    return {"loud": [tag.upper() for tag in batch["tag"].to_pylist()]}


def cry(batch: Any) -> Any:
    return {"loud": [str.upper(tag) for tag in batch["tag"].to_pylist()]}


def docs(
    folder: Path,
    text: str = "a",
    last: int = 6,
    fn: Any = shout,
    names: tuple[str, str] = ("tagged", "loud"),
) -> vd.Pipeline:
    rows = [{"id": n, "n": n, "day": DAYS[n % 2]} for n in range(last)]
    made = partitioned(vd.table(rows, partition_column="day"), DAYS)
    clean = made.project("clean", ["id", "n"])
    tagged = clean.map_batches(
        names[0], Tag, fn_constructor_kwargs={"text": text}, schema={"tag": "VARCHAR"}
    )
    loud = tagged.map_batches(names[1], fn, schema={"loud": "VARCHAR"})
    loud.write("published", f"{folder}/target/{{partition_key}}")
    return made


COMPUTE = InProcessCompute()


def run(pipeline: vd.Pipeline, store: vd.FragmentStore) -> dict[str, int]:
    """Run the first partition, and return the fragments that each stage computed."""
    planned = pipeline.plan(DAYS[0], store=store)
    pipeline.run(DAYS[0], store=store, compute=COMPUTE)
    return {each.stage: each.fragments for each in planned.stages}


def files(folder: Path) -> Mapping[str, bytes]:
    return {
        str(each.relative_to(folder)): each.read_bytes()
        for each in sorted(folder.rglob("*"))
        if each.is_file()
    }


@pytest.fixture
def production(tmp_path: Path) -> vd.FragmentStore:
    store = vd.FragmentStore(root=str(tmp_path / "store"))
    docs(tmp_path).run(store=store, compute=COMPUTE)
    return store


@pytest.fixture
def branch(tmp_path: Path) -> vd.FragmentStore:
    return vd.FragmentStore(root=str(tmp_path / "branch"), fallback=str(tmp_path / "store"))


def test_a_branch_computes_only_what_its_edits_change(tmp_path, production, branch):
    before = files(tmp_path / "store"), files(tmp_path / "target")
    traced = vd.trace("docs/loud", 2, partition="mon", store=branch)
    assert "table://" in str(traced), "the row of the source, which is in the fallback"
    assert set(run(docs(tmp_path), branch).values()) == {0}
    assert not (tmp_path / "branch" / "docs").exists()

    edited = docs(tmp_path, "b")
    assert run(edited, branch) == {"clean": 0, "tagged": 1, "loud": 1, "published": 1}
    assert set(run(edited, branch).values()) == {0}
    with pytest.raises(PlanError, match=rf"is a branch. Open it .*fallback='{production.root}'"):
        edited.run(store=branch.root, compute=COMPUTE)
    assert before == (files(tmp_path / "store"), files(tmp_path / "target"))

    loud = vd.load("docs/loud", store=branch).to_pydict()
    assert sorted(loud["loud"]) == ["A1", "A3", "A5", "B0", "B2", "B4"], "one day of each"
    published = list((tmp_path / "branch/~published/docs/published/mon").glob("*.parquet"))
    assert len(published) == 1


def test_a_branch_goes_on_after_its_promotion(tmp_path, production, branch):
    for text in "bc":
        edited = docs(tmp_path, text)
        run(edited, branch)
        promote(branch, production, "docs")
        assert run(edited, production) == {"clean": 0, "tagged": 0, "loud": 0, "published": 1}
    (file,) = (tmp_path / "target/mon").glob("*.parquet")
    assert pq.read_table(file).column("loud").to_pylist() == ["C0", "C2", "C4"]


def test_the_table_of_a_source_is_promoted(tmp_path, production, branch):
    docs(tmp_path, last=8).run(store=branch, compute=COMPUTE)
    made = names(tmp_path / "branch/~tables")
    promote(branch, production, "docs")
    shutil.rmtree(branch.root)
    assert made <= names(tmp_path / "store/~tables"), "its rows can be read and traced"


def test_the_types_that_a_branch_has_found_are_promoted(tmp_path, production, branch):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.csv").write_text("id,n\n1,1\n")

    def plan() -> vd.Pipeline:
        made = vd.Pipeline("texts", source=vd.csv(str(folder)), id="id")
        made.project("clean", ["n"])
        return made

    plan().run(store=branch, compute=COMPUTE)
    promote(branch, production, "texts")
    (folder / "b.csv").write_text("id,n\n2,x\n")
    for store in (branch, production):
        assert plan().source_schema(store).field("n").type == pa.int64()


class Upper:
    def __init__(self, mark: str = "") -> None:
        self.mark = mark

    def __call__(self, batch: Any) -> Any:
        return {"upper": [text.upper() + self.mark for text in batch["text"].to_pylist()]}


def texts(source: Any, mark: str = "", name: str = "texts") -> vd.Pipeline:
    made = vd.Pipeline(name, source=source, id="id")
    given = {"fn_constructor_kwargs": {"mark": mark}, "schema": {"upper": "VARCHAR"}}
    made.map_batches("upper", Upper, **given)
    return made


def test_an_edit_is_adopted_in_a_branch_by_rows_of_the_fallback(tmp_path, production, branch):
    before = files(tmp_path / "store")
    edited = docs(tmp_path, fn=cry)
    edited["loud"].adopt(2, store=branch, compute=COMPUTE)
    assert run(edited, branch)["loud"] == 0
    assert run(edited, production)["loud"] == 1, "the adoption is the branch's"
    changed = {name for name in before if files(tmp_path / "store").get(name) != before[name]}
    assert not changed


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.rglob("*") if each.is_file()}


def test_parts_of_the_fallback_are_used_and_copied(tmp_path, branch):
    """A file is added: the branch's manifest has two parts, of which it computed one."""
    production = vd.FragmentStore(root=branch.fallback)
    source = vd.parquet(f"{tmp_path}/source/*.parquet")
    write_source(tmp_path / "source", {"id": [0, 1, 2], "text": ["a", "b", "c"]}, "a.parquet")
    texts(source).run(store=production, compute=COMPUTE)
    before = files(tmp_path / "store")
    write_source(tmp_path / "source", {"id": [3, 4], "text": ["d", "e"]}, "b.parquet")

    texts(source).run(store=branch, compute=COMPUTE)
    assert before == files(tmp_path / "store")
    made = branch.open().in_force("texts", "upper", None)
    assert [part.made.run_id == made.run_id for part in made.parts] == [False, True]
    assert {part.name for part in made.parts} <= names(tmp_path / "branch/texts/upper/parts")
    for part in (tmp_path / "store/texts/upper/parts/~unpartitioned").iterdir():
        part.unlink()  # as a collection may do
    assert vd.load("texts/upper", store=branch).column("upper").to_pylist() == [*"ABCDE"]

    production_part = made.parts[0].name
    texts(source, "!").run(store=branch, compute=COMPUTE)
    texts(source).run(
        store=branch, compute=COMPUTE
    )  # what is gone from the fallback is computed again
    made = branch.open().in_force("texts", "upper", None)
    assert made.parts[0].name == production_part
    assert vd.load("texts/upper", store=branch).column("upper").to_pylist() == [*"ABCDE"]


def test_converted_files_are_taken_from_the_fallback(tmp_path, branch):
    production = vd.FragmentStore(root=branch.fallback)
    (tmp_path / "texts.csv").write_text("id,text\n1,a\n2,b")
    source = vd.csv(f"{tmp_path}/texts.csv")
    texts(source).run(store=production, compute=COMPUTE)
    before = files(tmp_path / "store")
    texts(source, "!").run(store=branch, compute=COMPUTE)
    assert before == files(tmp_path / "store")
    assert names(tmp_path / "branch/~tables") == names(tmp_path / "store/~tables")
    assert vd.load("texts/upper", store=branch).column("upper").to_pylist() == ["A!", "B!"]


def test_a_stored_asset_of_the_fallback_is_a_source_and_its_edit_is_one(tmp_path, branch):
    production = vd.FragmentStore(root=branch.fallback)
    write_source(tmp_path / "source", {"id": [0, 1], "text": ["a", "b"]}, "a.parquet")
    source = vd.parquet(f"{tmp_path}/source/*.parquet")
    first = texts(source)
    first["upper"].project("text", {"text": "upper"})
    first.run(store=production, compute=COMPUTE)
    second = texts(vd.stored("texts/text"), "?", "more")
    second.run(store=production, compute=COMPUTE)
    second.run(store=branch, compute=COMPUTE)
    assert not (tmp_path / "branch/more").exists()
    first = texts(source, "!")
    first["upper"].project("text", {"text": "upper"})
    first.run(store=branch, compute=COMPUTE)
    second.run(store=branch, compute=COMPUTE)
    assert vd.load("more/upper", store=branch).column("upper").to_pylist() == ["A!?", "B!?"]
    with pytest.raises(StoreError, match="its source is an asset committed in the branch"):
        promote(branch, production, "more")
    assert vd.load("more/upper", store=production).column("upper").to_pylist() == ["A?", "B?"]


def test_tables_are_published_below_the_root_or_where_targets_says(tmp_path, branch):
    write_source(tmp_path / "source", {"id": [0, 1], "text": ["a", "b"]}, "a.parquet")
    source, url = vd.parquet(f"{tmp_path}/source/*.parquet"), f"{tmp_path}/table"

    def published(mark: str, format: str = "delta", url: str = url, **given: Any) -> vd.Pipeline:
        made = texts(source, mark)
        made["upper"].write("out", url, format=format, **given)
        return made

    published("").run(store=vd.FragmentStore(root=branch.fallback), compute=COMPUTE)
    before = files(tmp_path / "table")
    published("!").run(store=branch, compute=COMPUTE)
    table = DeltaTable(f"{tmp_path}/branch/~published/texts/out").to_pyarrow_table()
    assert table.column("upper").to_pylist() == ["A!", "B!"]
    elsewhere = {"texts/out": f"{tmp_path}/elsewhere"}
    there = vd.FragmentStore(root=branch.root, fallback=branch.fallback, targets=elsewhere)
    published("?").run(store=there, compute=COMPUTE)
    table = DeltaTable(f"{tmp_path}/elsewhere").to_pyarrow_table()
    assert table.column("upper").to_pylist() == ["A?", "B?"]
    assert files(tmp_path / "table") == before
    published("?").run(store=branch, compute=COMPUTE)
    table = DeltaTable(f"{tmp_path}/branch/~published/texts/out").to_pyarrow_table()
    assert table.column("upper").to_pylist() == ["A?", "B?"], "the target of this run"

    for targets, message in (
        (
            {"texts/upper": "x"},
            "but pipeline 'texts' has no such write stage; expected 'texts/out'",
        ),
        ({"texts/out": url}, "which is the stage's target outside of"),
    ):
        wrong = vd.FragmentStore(root=branch.root, fallback=branch.fallback, targets=targets)
        with pytest.raises(PlanError, match=message):
            published("?").run(store=wrong, compute=COMPUTE)
    catalog = catalog_in(tmp_path / "catalog")
    lake = {"options": {"catalog": catalog, "table": "db.out"}}
    iceberg = published("", "iceberg", f"{tmp_path}/lake", **lake)
    with pytest.raises(PlanError, match=r"FragmentStore\(targets=\{'texts/out': 'db.branch'"):
        iceberg.run(store=branch, compute=COMPUTE)
    targets = {"texts/out": "db.branch"}
    iceberg.run(
        store=vd.FragmentStore(root=branch.root, fallback=branch.fallback, targets=targets),
        compute=COMPUTE,
    )
    assert opened(catalog).list_tables("db") == [("db", "branch")]
    assert opened(catalog).load_table("db.branch").scan().to_arrow().num_rows == 2
    assert not (tmp_path / "lake").exists()
