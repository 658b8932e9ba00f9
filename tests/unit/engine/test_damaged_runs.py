"""Damaged files in runs: what is seen of them, and that the next run computes them again."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.damage import (
    ROWS,
    cut,
    double,
    edit,
    flip,
    make,
    manifests,
    parts,
    rows,
    rows_of,
    source,  # noqa: F401  # fixtures
)
from support.data import partitioned, read_stage, write_source
from support.in_process import InProcessCompute
from vane_dagster.engine import committer
from vane_dagster.errors import StageError, VaneError
from vane_dagster.storage.publish.base import publish as committer_publish

DOUBLED = [2 * x for x in range(ROWS)]
NEGATED = [-y for y in DOUBLED]
Ran = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Ran:
    given: dict[str, Any] = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}

    def ran(pipeline: vd.Pipeline | None = None, select: Sequence[str] | None = None) -> str:
        """Return the error of a run, empty without one."""
        try:
            (pipeline or make(tmp_path)).run(select=select, **given)
        except VaneError as error:
            return str(error)
        return ""

    return ran


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
def test_damaged_parts_are_computed_again_by_the_next_run(harm, tmp_path, source, run, capsys):
    """Two of them, of a stage whose partition is in force, read by the stage below."""
    run(select=["clean", "double"])
    harmed = [parts(tmp_path, "double")[i] for i in (0, 2)]
    others = {p: p.stat().st_mtime_ns for p in parts(tmp_path, "double") if p not in harmed}
    before = manifests(tmp_path)
    for path in harmed:
        harm(path)
    if harm is not Path.unlink:  # a part that is not there is seen by the planner
        assert "It was removed (stage 'docs/double'" in run()
        printed = capsys.readouterr().out
        assert [printed.count(path.name) for path in harmed] == [1, 1]
    assert run() == ""
    assert rows_of(tmp_path, "double", "y") == DOUBLED
    assert rows_of(tmp_path, "negate", "z") == NEGATED
    assert len({*parts(tmp_path, "double")} - {*harmed, *others}) == len(harmed)
    assert {p: p.stat().st_mtime_ns for p in others} == others
    assert manifests(tmp_path).items() >= before.items()


def odd(batch: pa.Table) -> pa.Table:
    if os.environ.get("ENDPOINT_IS_DOWN"):
        raise StageError("the endpoint is down")
    if any(x % 2 == 0 for x in batch["x"].to_pylist()):
        raise ValueError("even")
    return pa.table({"y": batch["x"]})


def with_lists(tmp_path: Path, joined: str) -> vd.Pipeline:
    """A join with lists of children reads which rows of them are quarantined."""
    docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=10)
    clean = docs.project("clean", ["x"])
    options = grouped({"on_error": "quarantine", "max_error_rate": 1.0})
    ok = clean.map_batches("odd", odd, schema={"y": "BIGINT"}, **options)
    parts_of = ok.flat_map("ones", lambda y: [y], schema="BIGINT", id="part")
    docs.join(joined, clean, parts_of, how="left", children="list")
    return docs


def test_a_part_whose_failed_rows_are_damaged_is_computed_again(tmp_path, source, run):
    assert run(with_lists(tmp_path, "both")) == ""
    (first, *_) = sorted((tmp_path / "store/docs/odd/parts").rglob("*.faults.parquet"))
    cut(first)
    assert "It was removed (stage 'docs/odd'" in run(with_lists(tmp_path, "again"))
    assert run(with_lists(tmp_path, "again")) == ""


def test_nothing_waits_for_the_failed_rows_of_a_stage_that_is_given_up(
    tmp_path, source, run, monkeypatch
):
    assert run(with_lists(tmp_path, "both")) == ""
    parts(tmp_path, "odd")[0].unlink()
    monkeypatch.setenv("ENDPOINT_IS_DOWN", "1")
    assert "the endpoint is down" in run(with_lists(tmp_path, "again"), ["odd", "ones", "again"])


def upper_case(text: str) -> str:
    return text.upper()


@pytest.mark.parametrize("place", [1, -1])
def test_a_damaged_part_in_which_rows_of_another_fragment_are_looked_up(place, tmp_path, run):
    """Whether its fragment has begun or not."""

    def pipeline() -> vd.Pipeline:
        docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=10)
        upper = docs.map("upper", upper_case, schema="VARCHAR", reuse="rows")
        upper.project("last", {"n": "length(upper)"})
        return docs

    texts = [f"t{n}" for n in range(100)]
    write_source(
        tmp_path / "src", {"id": range(100), "text": texts}, "b.parquet", row_group_size=10
    )
    assert run(pipeline(), ["upper"]) == ""
    harmed = sorted(parts(tmp_path, "upper"), key=lambda p: pq.read_table(p)["id"][0].as_py())[
        place
    ]
    equal = {"id": [1000], "text": pq.read_table(harmed)["upper"].to_pylist()[:1]}
    equal["text"] = [text.lower() for text in equal["text"]]
    write_source(tmp_path / "src", equal, "a.parquet")
    flip(harmed, "upper")
    assert "It was removed (stage 'docs/upper'" in run(pipeline())
    assert run(pipeline()) == ""


def test_a_part_that_names_files_which_are_gone_is_computed_again(tmp_path, source, run):
    """Two runs may have computed it at once, and a collection keeps what the manifest names."""

    def pipeline(first: int) -> vd.Pipeline:
        docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=10)
        options = grouped({"on_error": "quarantine", "max_error_rate": 1.0, "version": str(first)})
        docs.map_batches("odd", odd, schema={"y": "BIGINT"}, **options)
        return docs

    assert [run(pipeline(version)) for version in (1, 2)] == ["", ""]
    before = sorted((tmp_path / "store/docs/odd/parts").rglob("*.faults.parquet"))
    for path in before:
        path.unlink()
    assert run(pipeline(1)) == ""
    assert vd.quarantine("docs/odd", store=str(tmp_path / "store")).num_rows == ROWS // 2


def test_partitions_that_wait_for_a_damaged_one_are_committed(tmp_path, run):
    """A check that compares partitions commits them in order: the second waits for the first."""
    for key, first in (("a", 0), ("b", 100)):
        write_source(tmp_path / "src" / key, rows(range(first, first + ROWS)))
    docs = partitioned(f"{tmp_path}/src", ["a", "b"])
    drift = vd.Asset(checks=[vd.checks.Drift("y")])
    clean = docs.project("clean", ["x", "note"])
    clean.map_batches("double", double, schema={"y": "BIGINT"}, asset=drift)

    run(docs, ["clean"])
    (harmed,) = (tmp_path / "store/docs/clean/parts/a").glob("*.parquet")
    flip(harmed, "x")
    assert run(docs, ["clean", "double"])
    expected = {"a": DOUBLED, "b": [200 + y for y in DOUBLED]}
    table = read_stage(tmp_path / "store", "docs", "double", "b")
    assert table["y"].to_pylist() == expected["b"]
    assert run(docs, ["clean", "double"]) == ""
    for key in "ab":
        table = read_stage(tmp_path / "store", "docs", "double", key)
        assert table["y"].to_pylist() == expected[key]


def test_a_damaged_part_of_a_stage_that_is_not_selected(tmp_path, source, run):
    run(select=["clean", "double"])
    victim = parts(tmp_path, "double")[1]
    flip(victim)
    damaged = (
        rf"'docs/double', file '\S+{victim.name}': .*Materialize 'docs/double' again with force"
    )
    with pytest.raises(vd.errors.StoreError, match=damaged):
        vd.load("docs/double", store=str(tmp_path / "store"))
    before = manifests(tmp_path)
    message = run(select=["negate"])
    assert victim.name in message
    assert "It was removed (stage 'docs/double'" in message
    assert "Select 'double' too, or use force there" in message
    assert not victim.exists()
    assert manifests(tmp_path) == before

    assert run(select=["double", "negate"]) == ""
    assert rows_of(tmp_path, "negate", "z") == NEGATED


def test_a_damaged_part_of_a_fallback_is_computed_in_the_branch(tmp_path, source, run):
    run(select=["clean", "double"])
    victim = parts(tmp_path, "double")[1]
    flip(victim)
    harmed = victim.read_bytes()
    branch = vd.FragmentStore(root=str(tmp_path / "branch"), fallback=str(tmp_path / "store"))

    def error(select: Sequence[str]) -> str:
        try:
            make(tmp_path).run(select=select, store=branch, compute=InProcessCompute())
        except VaneError as raised:
            return str(raised)
        return ""

    assert "It belongs to the fallback store (stage 'docs/double'" in error(["negate"])
    assert error(["double", "negate"]) == ""
    assert vd.load("docs/negate", store=branch)["z"].to_pylist() == NEGATED
    assert vd.load("docs/double", store=branch)["y"].to_pylist() == DOUBLED
    assert victim.read_bytes() == harmed


def test_a_part_that_nobody_names_yet_is_passed_over(tmp_path, source, run, capsys):
    """What a killed run has left, found by the planner."""
    run()
    for path in manifests(tmp_path):
        if "/double/" in path:
            Path(path).unlink()
    cut(parts(tmp_path, "double")[0])
    assert run() == ""
    assert rows_of(tmp_path, "double", "y") == DOUBLED
    printed = capsys.readouterr().out
    assert "double: partitions: 1 committed; " in printed
    assert "fragments: 1 computed, 2 reused" in printed
    assert "is damaged and cannot be read" in printed
    assert "It is computed again" in printed


@pytest.mark.parametrize(
    ("options", "staged"),
    [({"target_file_bytes": 1 << 20}, "."), ({"format": "lance"}, "~unpartitioned")],
    ids=["merged", "lance"],
)
def test_a_damaged_part_that_a_commit_reads(tmp_path, source, run, monkeypatch, options, staged):
    """What was published before stays, the part is removed, and the next run repairs it."""
    docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=10)
    docs.project("clean", ["x"]).write("out", f"{tmp_path}/out", **options)
    run(docs)
    edit(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(committer, "publish", harming(tmp_path / "out/_vane_staging" / staged))
        message = run(docs)
    assert "could not be committed" in message
    assert "is damaged and cannot be read" in message
    assert "it was removed. Run again to recompute it" in message
    out = tmp_path / "out"
    published = lance.dataset(out).to_table() if "format" in options else pq.read_table(out)
    assert sorted(published["x"].to_pylist()) == [*range(ROWS)]
    assert vd.load("docs/out", store=str(tmp_path / "store"))["x"].to_pylist() == [*range(ROWS)]

    assert run(docs) == ""
    read = vd.load("docs/out", store=str(tmp_path / "store"))
    assert read["x"].to_pylist() == [*range(1, ROWS + 1)]


def harming(staging: Path) -> Callable[..., Any]:
    def publish(*given: Any) -> Any:
        flip(sorted(staging.iterdir())[1], "x")
        return committer_publish(*given)

    return publish


def drawn(x: int) -> str:
    if os.environ.get("ENDPOINT_IS_DOWN") and x >= ROWS - 10:
        raise StageError("the endpoint is down")
    return f"{x} {secrets.token_hex(8)}"


def test_rows_below_a_lost_part_are_computed_again_if_it_has_others_now(
    tmp_path, source, run, monkeypatch
):
    """A run that fails meanwhile is resumed."""

    def pipeline(last: str) -> vd.Pipeline:
        docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=10)
        first = docs.map("drawn", drawn, schema="VARCHAR")
        first.map("upper", upper_case, columns={"text": "drawn"}, schema="VARCHAR")
        docs.project(last, ["id"])
        return docs

    assert run(pipeline("first")) == ""
    for part in parts(tmp_path, "drawn"):
        part.unlink()
    monkeypatch.setenv("ENDPOINT_IS_DOWN", "1")
    assert run(pipeline("second"))  # so that the partition is planned
    kept = {*parts(tmp_path, "drawn")}
    monkeypatch.delenv("ENDPOINT_IS_DOWN")
    assert run(pipeline("third")) == ""
    assert kept < {*parts(tmp_path, "drawn")}
    assert (len(kept), len(parts(tmp_path, "drawn"))) == (2, 3)
    drawn_now, upper = (rows_of(tmp_path, stage, stage) for stage in ("drawn", "upper"))
    assert upper == [text.upper() for text in drawn_now]
