"""Checks: how they are declared, what is counted for them, and what they find; users' own ones."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vane_dagster as vd
from support.data import write_source
from support.in_process import compute
from vane_dagster.checks.builtin import defaults_for, findings_of, merge
from vane_dagster.checks.partition import CheckContext, sample
from vane_dagster.engine.check_runner import CheckRunner, evaluate, results_for
from vane_dagster.events import Committed
from vane_dagster.providers.usage import USAGE
from vane_dagster.storage.column_stats import measure, merge_measures
from vane_dagster.storage.manifest import (
    CheckResult,
    Manifest,
    PartInfo,
    PartProvenance,
)

SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "text": pa.string(),
        "score": pa.float64(),
        "vector": pa.list_(pa.float32(), 3),
    }
)
C = vd.checks
MADE = PartProvenance("run", ("worker",), 0.0, 1.0)


# --- declared


def test_defaults_follow_what_a_stage_makes():
    def named(*args: Any) -> dict[str, list[str]]:
        return {c.name: [each.name for each in c.findings] for c in defaults_for(*args)}

    rows = ["ids_complete", "error_rate"]
    made = pa.schema(list(SCHEMA)[1:])
    assert named(made, "map_batches") == {
        "rows": [*rows, "vectors"],
        "quality": ["packages_unchanged", "null_rate", "text"],
    }
    lists = pa.schema({"v": pa.list_(pa.float32()), "n": pa.list_(pa.int32(), 3)})
    calls = {"rows": rows, "quality": ["packages_unchanged", "null_rate"]}
    assert named(lists, "map_batches") == calls
    assert named(pa.schema([]), "map_batches")["quality"] == ["packages_unchanged"]
    assert named(None, "project") == {"rows": rows, "quality": ["null_rate"]}
    assert named(None, "embed") == {"rows": [*rows, "vectors"], "quality": ["null_rate"]}
    assert named(None, "join") == {"rows": rows, "quality": ["null_rate"]}
    assert named(pa.schema([]), "write") == {"rows": rows}
    tensors = pa.schema({"v": vd.tensor("float32", (3,))})
    assert named(tensors, "map_batches")["rows"] == [*rows, "vectors"]
    assert named(pa.schema({"v": vd.tensor("float32", (3, 2))}), "map_batches") == calls
    assert named(None, "map_batches") == {**calls, "rows": [*rows, "vectors"]}
    found = defaults_for(made, "map_batches")
    assert [(c.blocking, c.severity) for c in found] == [(True, "ERROR"), (False, "WARN")]
    assert defaults_for(None, "project", 0.3)[0].findings[1] == vd.checks.ErrorRate(0.3)


def test_a_given_check_is_split_off_and_off_removes_a_finding():
    c = vd.checks
    merged = merge(
        defaults_for(SCHEMA, "map_batches"),
        [c.Off("text"), c.NullRate(0.1, blocking=True), c.Drift("score"), c.Drift("text")],
        "stage 'p/s'",
    )
    names = ["rows", "quality", "null_rate", "drift_score", "drift_text"]
    assert [check.name for check in merged] == names
    assert merged[2] == c.NullRate(0.1, blocking=True)
    left = [each.name for each in findings_of(merged[:2])]
    assert left == ["ids_complete", "error_rate", "vectors", "packages_unchanged"]
    defaults = defaults_for(SCHEMA, "project")
    assert merge(defaults, [c.Off("quality")], "stage") == defaults[:1]
    assert merge(defaults, [c.Off("null_rate"), c.Off("text")], "stage") == defaults[:1]
    own = c.NullRate(0.2, name="quality")
    assert merge(defaults, [own], "stage") == (defaults[0], own)


def test_a_default_check_names_what_failed_and_the_fix(tmp_path: Path):
    table = rows(x=["a", " ", None, "b"], v=vectors([[0, 0, 0], [1, 2, 3], None, [1, 1, 1]]))
    context = closed(stage(tmp_path, table, rows_in=24, quarantined=20))
    context = replace(context, _first_faults=lambda limit: ["id 7: ValueError: x"])
    schema = pa.schema(list(table.schema)[1:])
    found, quality = evaluate(defaults_for(schema, "map_batches"), context)
    assert (found.passed, found.blocking, quality.passed) == (False, True, True)
    assert found.description == (
        "error_rate: 20 of 24 rows failed (83.33%); the limit is 10 rows. The first: id 7: "
        "ValueError: x. vd.quarantine returns the rows with errors; vd.Failures(max_error_rate=) "
        "sets the limit; vectors: v: 1 of 3 vectors are zero or not finite (33.33%; 1 zero, 0 not "
        "finite); the limit is 0%. Filter such rows, or accept a share by "
        "vd.checks.Vectors(max_rate=)"
    )
    outcomes = {each["finding"]: each["passed"] for each in found.metadata["findings"]}
    assert outcomes == {"ids_complete": True, "error_rate": False, "vectors": False}
    assert (found.metadata["quarantined"], found.metadata["zero/v"]) == (20, 1)
    assert quality.description == "Passed: packages_unchanged, null_rate, text"
    assert (quality.metadata["null_rate/v"], quality.metadata["packages_changed"]) == (0.25, 0)
    checks = defaults_for(schema, "map_batches")
    stored = results_for(checks, replace(context._manifest, checks=(found, quality)))
    assert list(stored) == ["rows"], "versions of packages are compared in each run"


@pytest.mark.parametrize(
    ("given_checks", "message"),
    [
        ([vd.checks.Off("nulls")], "'null_rate'"),
        (
            [vd.checks.Drift("a"), vd.checks.Drift("a", min_rows=5)],
            "two checks are named 'drift_a'",
        ),
        ([vd.checks.NullRate], "expected a list of checks"),
        (vd.checks.NullRate(), "expected a list of checks"),
    ],
)
def test_wrong_lists_of_checks_are_refused(given_checks: Any, message: str):
    with pytest.raises(vd.errors.DefinitionError) as error:
        merge(defaults_for(SCHEMA, "map_batches"), given_checks, "stage 'p/s'")
    assert message in str(error.value)
    assert str(error.value).startswith("stage 'p/s'")


@pytest.mark.parametrize(
    "make",
    [
        lambda c: c.NullRate(1.5),
        lambda c: c.NullRate(name="null rate"),
        lambda c: c.NullRate(severity="FATAL"),
        lambda c: c.NullRate(blocking=1),
        lambda c: c.Drift(""),
        lambda c: c.Drift("a", max_distance=math.inf),
        lambda c: c.Drift("a", min_rows=0),
        lambda c: c.Golden({"id": [1], "x": [1, 2]}),
        lambda c: c.Golden(7),
        lambda c: c.Compared("./store"),
        lambda c: c.Compared(Path("store")),
        lambda c: c.Compared(max_different=1.5),
        lambda c: c.Reproducible(rows=0),
        lambda c: c.Reproducible(blocking=True),
    ],
)
def test_wrong_thresholds_are_refused_where_they_are_written(make: Any):
    with pytest.raises(vd.errors.DefinitionError, match=r"vd\.checks\."):
        make(vd.checks)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (vd.checks.NullRate(0.1, columns=["other"]), "'other'"),
        (vd.checks.Vectors(["text"]), "string"),
        (vd.checks.Text(columns=["vector"]), "fixed_size_list"),
        (vd.checks.Drift("other"), "'other'"),
        (vd.checks.Golden({"id": [1], "other": [1]}), "'other'"),
    ],
)
def test_checks_of_columns_that_a_stage_lacks_are_refused(check: Any, message: str):
    with pytest.raises(vd.errors.DefinitionError, match="stage 'p/s'") as error:
        check.fit(SCHEMA, "stage 'p/s'")
    assert message in str(error.value)
    for fitting in (vd.checks.Vectors(), vd.checks.Text(), vd.checks.Drift("vector")):
        fitting.fit(SCHEMA, "stage")
    for fitting in (vd.checks.Vectors(["v"]), vd.checks.Drift("v")):
        fitting.fit(pa.schema({"v": vd.tensor("float32", (3,))}), "stage")
    docs = vd.Pipeline("docs", source=vd.parquet("/none"), id="id")
    asset = vd.Asset(checks=[C.Text(columns=["n"])])
    with pytest.raises(vd.errors.DefinitionError, match="'docs/v'"):
        docs.map_batches("v", len, schema={"n": "BIGINT"}, asset=asset)


@pytest.mark.parametrize("kind", ["project", "map_batches"])
def test_checks_of_columns_that_the_source_decides_are_refused_by_the_plan(kind: str):
    def planned(column: str) -> None:
        docs = vd.Pipeline("docs", source=vd.parquet("/none"), id="id")
        asset = vd.Asset(checks=[C.Drift(column)])
        if kind == "project":
            docs.project("out", ["id", "score"], asset=asset)
        else:
            made = {"schema": {"n": "BIGINT"}, "include_columns": ["score"]}
            docs.map_batches("out", len, columns=["text"], asset=asset, **made)
        docs._resolve_schemas(["out"], {"source": SCHEMA})

    planned("score")
    with pytest.raises(vd.errors.DefinitionError, match="no column 'scores'"):
        planned("scores")


# --- counted

FLOATS = st.sampled_from([0.0, -0.0, 1.0, -2.5, math.nan, math.inf, -math.inf, None])
EXTREME = st.sampled_from([0.0, 3.3e38, -3.3e38, 1e-40, 1e-45])
TEXTS = st.text(st.sampled_from("ab \t\n\u00a0\u3000\u200b\x1c"), max_size=3)


def rows_of(values: Any) -> Any:
    return st.lists(st.none() | values, max_size=12)


def fixed(kind: pa.DataType, size: int, floats: Any) -> Any:
    rows = rows_of(st.lists(floats, min_size=size, max_size=size))
    return rows.map(lambda found: (pa.list_(kind, size), found))


COLUMNS = st.one_of(
    rows_of(TEXTS).map(lambda found: (pa.string(), found)),
    rows_of(TEXTS).map(lambda found: (pa.large_string(), found)),
    rows_of(TEXTS).map(lambda found: (pa.dictionary(pa.int32(), pa.string()), found)),
    rows_of(st.integers(0, 3)).map(lambda found: (pa.int16(), found)),
    fixed(pa.float16(), 2, FLOATS),
    fixed(pa.float32(), 3, FLOATS | EXTREME),
    fixed(pa.float64(), 1, FLOATS),
    fixed(pa.float32(), 0, FLOATS),
    rows_of(st.lists(FLOATS | EXTREME, max_size=3)).map(
        lambda found: (pa.list_(pa.float32()), found)
    ),
    rows_of(st.lists(FLOATS, max_size=3)).map(lambda found: (pa.large_list(pa.float64()), found)),
)


def slow(kind: pa.DataType, rows: list[Any]) -> dict[str, float]:
    present = [row for row in rows if row is not None]
    found: dict[str, float] = {"nulls": len(rows) - len(present)}
    if kind == pa.int16():
        return found
    if not hasattr(kind, "value_field"):
        return found | {"empty": sum(row.strip() == "" for row in present)}
    finite = [all(x is not None and math.isfinite(x) for x in row) for row in present]
    zero = [ok and not any(row) for ok, row in zip(finite, present)]
    found |= {"not_finite": finite.count(False), "zero": zero.count(True)}
    if present:
        sizes = [len(row) for row in present]
        found |= {"dim_min": min(sizes), "dim_max": max(sizes)}
    return found


def pieces(kind: pa.DataType, rows: list[Any], cuts: list[int]) -> pa.ChunkedArray:
    """The rows in chunks, each a slice of an array with other rows before and after."""
    edges = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
    array = pa.array([*rows[::-1], *rows, *rows], kind)
    spans = itertools.pairwise(edges) if rows else ()
    return pa.chunked_array([array.slice(len(rows) + a, b - a) for a, b in spans], kind)


@settings(max_examples=60)
@given(COLUMNS, st.lists(st.integers(0, 20), max_size=3))
def test_measures_are_those_of_a_loop_over_rows(column: Any, cuts: list[int]):
    kind, rows = column
    table = pa.table({"id": pa.nulls(len(rows)), "x": pieces(kind, rows, cuts)})
    expected = slow(kind, rows)
    assert measure(table, ["x"]) == {"x": expected}
    half = len(rows) // 2
    parts = [measure(table.slice(0, half), ["x"]), measure(table.slice(half), ["x"])]
    assert merge_measures(parts) == {"x": expected}


# --- found


def test_what_lies_under_a_null_vector_is_not_counted():
    values = pa.array([math.nan, 1, 0, 0, 1, 1], pa.float32())
    vectors = pa.FixedSizeListArray.from_arrays(values, 2, mask=pa.array([True, True, False]))
    assert measure(pa.table({"x": vectors}), ["x"]) == {
        "x": {"nulls": 2, "not_finite": 0, "zero": 0, "dim_min": 2, "dim_max": 2}
    }


def stage(tmp_path: Path, *tables: pa.Table, measured: bool = True, **counts: int) -> CheckContext:
    """A stage of one part for each table, as files, with what a worker records of them."""
    folder = tmp_path / f"stage{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    parts = []
    for index, table in enumerate(tables):
        pq.write_table(table, folder / f"{index}.parquet", row_group_size=1000)
        columns = [name for name in table.column_names if name != "id"]
        counted = {"rows_in": table.num_rows, **counts}
        found = measure(table, columns) if measured else {}
        parts.append(
            PartInfo(f"{index}", "d", table.num_rows, 1, made=MADE, measures=found, **counted)
        )
    schema = tables[0].schema
    manifest = Manifest(
        "p", "s", None, 0, "", "", schema, (), parts, (), {}, "run", 0.0, keys=("id",)
    )
    files = [str(folder / f"{index}.parquet") for index in range(len(tables))]
    return CheckContext("id", manifest.schema, manifest, lambda: ds.dataset(files, schema=schema))


def closed(context: CheckContext) -> CheckContext:
    """The same, whose data must not be opened."""

    def refuse() -> Any:
        raise AssertionError("data was opened")

    return replace(context, _dataset=refuse, _previous=refuse)


def sizes(batch: pa.Table) -> dict[str, Any]:
    return {"size": [len(text) for text in batch["text"].to_pylist()]}


def test_default_checks_read_no_rows_of_columns_that_are_passed_on(tmp_path, store, monkeypatch):
    vectors = pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2))
    write_source(tmp_path / "src", {"id": [1, 2], "text": ["a", " "], "vector": vectors})
    docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id")
    sized = docs.map_batches(
        "sized", sizes, columns=["text"], schema={"size": "BIGINT"}, include_columns=True
    )
    passed = sized.project("passed", {"text": "text", "vector": "vector", "more": "size + 1"})
    docs.join("both", sized, passed.project("some", ["more"], where="id = 1"), how="left")
    monkeypatch.setattr(CheckRunner, "_dataset", lambda *_: pytest.fail("rows were read"))

    events = compute(docs, store)

    found = {each.stage: each.manifest for each in events if isinstance(each, Committed)}
    for name, columns in (("sized", 3), ("passed", 3), ("both", 4)):
        (result,) = [each for each in found[name].checks if each.name == "quality"]
        rates = {k: v for k, v in result.metadata.items() if "null_rate/" in k}
        assert len(rates) == columns, name
        assert rates["null_rate/vector"] == 0.5


def one(check: vd.checks.Check, context: CheckContext) -> CheckResult:
    (found,) = evaluate([check], context)
    json.dumps(asdict(found), allow_nan=False)
    values = found.metadata.values()
    assert all(type(value) in (int, float, str, list) for value in values)
    assert found.name == check.name
    return found


def rows(**columns: Any) -> pa.Table:
    count = len(next(iter(columns.values())))
    return pa.table({"id": range(count), **columns})


def vectors(values: Any, size: int | None = 3) -> pa.Array:
    kind = pa.list_(pa.float32(), size) if size else pa.list_(pa.float32())
    return pa.array(values, kind)


def tensors(values: Any) -> pa.Array:
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.array(values, np.float32))


ODD = [[0, 0, 0], [1, 2, 3], None, [1, 1, 1]]
TWO = {"x": ["a", None, " ", "b"], "y": ["a", "b", "c", "d"]}
BAD = "v: 1 of 3 vectors are zero or not finite (33.33%; 1 zero, 0 not finite); the limit is"


@pytest.mark.parametrize(
    ("check", "columns", "counts", "passed", "described", "metadata"),
    [
        (C.IdsComplete(), {"x": [1, 2, 3]}, {"rows_in": 6, "filtered": 2, "quarantined": 1}, True,
         "All 6 input rows are in the output, filtered or quarantined",
         {"rows": 3, "rows_in": 6, "filtered": 2, "quarantined": 1, "nulled": 0, "lost": 0,
          "invented": 0}),
        (C.IdsComplete(), {"x": [1, 2, 3]}, {"rows_in": 6, "filtered": 2}, False,
         "1 of 6 input rows are missing from the output; 0 output rows have no input row",
         {"lost": 1}),
        (C.IdsComplete(), {"x": [1, 2, 3]}, {"rows_in": 2}, False,
         "0 of 2 input rows are missing from the output; 1 output rows have no input row",
         {"invented": 1}),
        (C.ErrorRate(0.01), {"x": [1]}, {"rows_in": 30_000, "quarantined": 301}, False,
         "301 of 30,000 rows failed (1.003%); the limit is 1%", {"error_rate": 301 / 30_000}),
        (C.ErrorRate(0.25), {"x": [1, 2, 3]}, {"rows_in": 4, "quarantined": 1}, True,
         "1 of 4 rows failed (25%); the limit is 25%", {"max_failed_rows": 1}),
        (C.NullRate(0.2), TWO, {}, False, "x: 25% nulls; the limit is 20%",
         {"rows": 4, "null_rate/x": 0.25, "null_rate/y": 0.0}),
        (C.NullRate(0.1, columns=["y"]), TWO, {}, True, "y: 0% nulls; the limit is 10%", {}),
        (C.NullRate(0.5, columns=["z"]), TWO, {}, False, "DefinitionError", {}),
        (C.NullRate(0.1), {f"x{i}": [None, "a"] for i in range(7)}, {}, False,
         "x4: 50% nulls; the limit is 10%; and 2 more", {}),
        (C.NullRate(0), {"x": [1], "error": pa.nulls(1, pa.string())}, {}, True, "x: 0%", {}),
        (C.NullRate(0), {"x": [1], "x_usage": pa.nulls(1, USAGE)}, {}, True, "x: 0%", {}),
        (C.NullRate(0, columns=["error"]), {"error": [None]}, {}, False, "error: 100% nulls", {}),
        (C.Text(0.2), TWO, {}, False, "x: 33.33% empty texts; the limit is 20%",
         {"rows": 4, "empty_rate/x": 1 / 3}),
        (C.Vectors(), {"v": ODD}, {}, False, f"{BAD} 0%",
         {"rows": 4, "max_bad_rate": 0.0, "not_finite/v": 0, "zero/v": 1, "bad_rate/v": 1 / 3,
          "dimension/v": 3}),
        (C.Vectors(max_rate=0.5), {"v": ODD}, {}, True, f"{BAD} 50%", {}),
        (C.Vectors(), {"v": [[1, math.nan, 1]]}, {}, False, "0 zero, 1 not finite", {}),
        (C.Vectors(["w"]), {"w": [[1, 2, 3], [1, 2]]}, {}, False,
         "w: the dimension varies from 2 to 3; expected one",
         {"dimension_min/w": 2, "dimension_max/w": 3}),
        (C.Vectors(), {"v": [[1, 2, 3]], "w": [[0]]}, {}, True, "v: 0 of 1", {}),
        (C.Vectors(["w"]), {"v": [[1, 2, 3]], "w": [[0]]}, {}, False, "w: 1 of 1", {}),
        (C.Vectors(), {"t": tensors([[1, math.nan], [0, 0]])}, {}, False, "2 of 2",
         {"not_finite/t": 1, "zero/t": 1, "dimension/t": 2}),
        (C.Vectors(["x"]), {"x": [1]}, {}, False, "DefinitionError", {}),
        (C.Vectors(), {"w": [[1, 2, 3], [1, 2]]}, {}, True, "The stage has no vectors", {}),
        (C.Text(), {"w": [[1, 2, 3], [1, 2]]}, {}, True, "The stage has no column to check", {}),
    ],
)  # fmt: skip
def test_what_a_check_finds_and_says(
    tmp_path: Path, check: Any, columns: Any, counts: Any, passed: bool, described: str,
    metadata: Any
):  # fmt: skip
    kinds = {"v": pa.list_(pa.float32(), 3), "w": pa.list_(pa.float32())}
    table = rows(**{n: pa.array(v, kinds[n]) if n in kinds else v for n, v in columns.items()})
    found = one(check, closed(stage(tmp_path, table, **counts)))
    assert (found.passed, found.blocking) == (passed, check.blocking)
    assert found.severity == check.severity
    assert described in found.description
    assert {**found.metadata, **metadata} == found.metadata


def test_a_partition_without_rows_passes(tmp_path: Path):
    empty = SCHEMA.empty_table()
    context = stage(tmp_path, empty)
    manifest = replace(context._manifest, partition="a")
    context = replace(context, _manifest=manifest, _previous=lambda: context)
    c = vd.checks
    checks = [*defaults_for(SCHEMA, "map_batches"), c.Drift("score"), c.Drift("text")]
    golden = c.Golden({"id": [1], "text": ["a"]})
    for result in evaluate([*checks, c.Drift("vector"), golden], context):
        assert result.passed, result


class PanicException(BaseException):
    """As extensions in Rust raise it: no `Exception`."""


@pytest.mark.parametrize(
    ("error", "ends_the_run"),
    [
        (PermissionError, False),
        (PanicException, False),
        (SystemExit, False),
        (KeyboardInterrupt, True),
        (dg.DagsterExecutionInterruptedError, True),
    ],
)
def test_a_check_that_raises_has_failed_unless_the_run_is_interrupted(
    tmp_path: Path, error: Any, ends_the_run: bool
):
    def broken() -> Any:
        raise error("no access")

    context = replace(stage(tmp_path, rows(x=[1])), _dataset=broken)
    checks = [vd.checks.IdsComplete(), golden({"id": [0], "x": [1]})]
    if ends_the_run:
        with pytest.raises(error):
            evaluate(checks, context)
        return
    found = evaluate(checks, context)
    assert [result.passed for result in found] == [True, False]
    assert found[1].metadata == {"error": f"{error.__name__}: no access"}
    assert f"{error.__name__}: no access" in found[1].description
    kept = results_for(checks, replace(context._manifest, checks=found))
    assert list(kept) == ["ids_complete"], "the other is evaluated again"


# --- drift


def compare(tmp_path: Path, check: vd.checks.Check, now: pa.Table, before: pa.Table) -> CheckResult:
    other = stage(tmp_path, before)
    other = replace(other, _manifest=replace(other._manifest, partition="2024-01-01"))
    context = stage(tmp_path, now)
    return one(check, replace(context, _previous=lambda: other))


RNG = np.random.default_rng(7)


@pytest.mark.parametrize(
    ("before", "same", "moved"),
    [
        (RNG.normal(size=5000), RNG.normal(size=4000), RNG.normal(1, size=4000)),
        (RNG.integers(0, 9, 3000), RNG.integers(0, 9, 5000), RNG.integers(3, 12, 5000)),
        ([0] * 950 + [1] * 50, [0] * 1900 + [1] * 100, [0] * 1000 + [1] * 1000),
        ([0.5] * 600 + [None] * 10, [0.5] * 600, [0.5] * 300 + [None] * 300),
        (["a", "b"] * 500, ["b", "a"] * 400, ["a"] * 900 + ["b"] * 100),
        (["a"] * 600, ["a"] * 700, ["new"] * 600),
        ([True, False] * 300, [False, True] * 300, [True] * 600),
        ([Decimal("0.5")] * 600, [Decimal("0.5")] * 600, [Decimal("1.5")] * 600),
    ],
)
def test_drift_is_seen_and_chance_is_not(tmp_path: Path, before: Any, same: Any, moved: Any):
    check = vd.checks.Drift("x")
    fine = compare(tmp_path, check, rows(x=same), rows(x=before))
    assert (fine.passed, fine.metadata["previous"]) == (True, "2024-01-01"), fine
    assert fine.metadata["psi"] < 0.1
    assert "stability index of x against partition '2024-01-01' is" in fine.description
    assert (fine.metadata["rows"], fine.metadata["rows_previous"]) == (len(same), len(before))
    drifted = compare(tmp_path, check, rows(x=moved), rows(x=before))
    assert (drifted.passed, drifted.severity) == (False, "WARN"), drifted
    assert drifted.metadata["psi"] > 0.2


def test_drift_of_vectors_is_the_distance_of_their_centroids(tmp_path: Path):
    base = RNG.normal([1, 0, 0], 0.3, size=(1000, 3)).tolist()
    other = RNG.normal([1, 0, 0], 0.3, size=(1000, 3)).tolist()
    turned = RNG.normal([0, 1, 0], 0.3, size=(1000, 3)).tolist()
    check = vd.checks.Drift("v")
    before = rows(v=vectors(base))
    odd = [None, [math.nan, 1, 1], *other]
    fine = compare(tmp_path, check, rows(v=vectors(odd)), before)
    assert (fine.passed, fine.metadata["rows"]) == (True, 1002)
    assert fine.metadata["distance"] < 0.01
    assert fine.description.startswith("The cosine distance between the centroids of v against p")
    for column in (vectors(turned, None), tensors(turned)):
        drifted = compare(tmp_path, check, rows(v=column), before)
        assert not drifted.passed
        assert drifted.metadata["distance"] == pytest.approx(1, abs=0.1)
    longer = compare(tmp_path, check, rows(v=vectors([[1, 2]] * 600, None)), before)
    assert (longer.passed, "have dimension 2; in" in longer.description) == (False, True)
    ragged = compare(tmp_path, check, rows(v=vectors([[1, 2], [1]] * 600, None)), before)
    assert "different dimensions" in ragged.description


@pytest.mark.parametrize(
    ("now", "before", "passed", "described"),
    [
        ({"x": [1.0] * 600}, {"x": [2.0] * 499}, True, "Not compared: there are 600 rows here and "
         "499 in partition '2024-01-01'; at least 500 with a value are needed in each"),
        ({"x": [[1.0, 2.0]] * 600}, {"x": pa.nulls(600, pa.list_(pa.float64()))}, True,
         "Not compared: there are 600 rows"),
        ({"x": [1.0] * 600}, {"x": [2.0] * 500}, False, "stability index"),
        ({"x": [1.0]}, {"x": ["a"]}, False, "was string"),
        ({"x": [1.0]}, {"y": ["a"]}, False, "no column 'x'"),
        ({"x": pa.array([0], pa.date32())}, {"x": pa.array([0], pa.date32())}, False, "date32"),
    ],
)  # fmt: skip
def test_drift_needs_enough_rows_of_one_type(
    tmp_path: Path, now: Any, before: Any, passed: bool, described: str
):
    check = vd.checks.Drift("x")
    alone = one(check, stage(tmp_path, rows(x=[1.0] * 600)))
    assert (alone.passed, "no previous partition" in alone.description) == (True, True)
    found = compare(tmp_path, check, rows(**now), rows(**before))
    assert found.passed == passed
    assert described in found.description


@settings(max_examples=20)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(1, 60))
def test_a_sample_is_of_rows_of_all_fragments_and_always_the_same(sizes: list[int], count: int):
    ends = np.cumsum(sizes)
    tables = [pa.table({"x": range(end - size, end)}) for size, end in zip(sizes, ends.tolist())]
    schema = pa.schema({"x": pa.int64()})
    batches = [batch for table in tables for batch in table.to_batches()]
    dataset = ds.InMemoryDataset(pa.Table.from_batches(batches, schema))
    found = [value for batch in sample(dataset, ["x"], count) for value in batch["x"].to_pylist()]
    total = sum(sizes)
    assert len(found) == min(count, total)
    if total > count:
        chance = np.random.default_rng(0)
        chosen = np.sort(chance.choice(total, count, replace=False, shuffle=False))
        assert found == chosen.tolist()
    again = [value for batch in sample(dataset, ["x"], count) for value in batch["x"].to_pylist()]
    assert again == found


def test_a_sample_is_spread_over_many_files(tmp_path: Path):
    tables = [pa.table({"x": [n] * 3000, "y": ["text"] * 3000}) for n in range(70)]
    dataset = stage(tmp_path, *tables, measured=False)._dataset()
    found = np.concatenate([batch["x"].to_numpy() for batch in sample(dataset, ["x"], 6400)])
    counts = np.bincount(found, minlength=70)
    assert len(found) == 6400
    assert np.count_nonzero(counts) == 64
    assert counts[[0, 69]].min() > 50
    assert counts.max() < 200


# --- golden

GOLDEN = pa.table(
    {
        "id": [3, 1],
        "text": ["c", "a"],
        "score": [0.3, 0.1],
        "vector": [[3.0, 0, 1], [1.0, 0, 1]],
    }
)


def actual(**changed: Any) -> pa.Table:
    table = {
        "id": [0, 1, 2, 3],
        "text": ["x", "a", "x", "c"],
        "score": [0, 0.1, 0, 0.3],
        "vector": [[9, 9, 9], [1, 0, 1], [9, 9, 9], [3, 0, 1]],
    }
    return pa.table({**table, **changed}, schema=SCHEMA)


def golden(rows: Any = GOLDEN, **options: Any) -> Any:
    return vd.checks.Golden(rows, **options)


C_DIFFERS = {"text": ["x", "a", "x", "C"]}
ONE_MORE = {"id": [1, 3, 77], "text": ["a", "c", "z"]}
NONE_OF_THEM = {"id": [76, 77], "text": ["z", "z"]}


@pytest.mark.parametrize(
    ("check", "changed", "partition", "passed", "described", "metadata"),
    [
        (golden(), {}, None, True, "2 of 2", {"found": 2, "expected": 2}),
        (golden(), C_DIFFERS, None, False,
         "1 of 2 rows differ from the expected values: ids 3, in 'text'", {"differing": 1}),
        (golden({"id": [1, 3], "score": [0.1, 0.3]}), C_DIFFERS, None, True, "2 of 2", {}),
        (golden(), {"score": [0, 0.1, 0, math.inf]}, None, False, "ids 3, in 'score'", {}),
        (golden(), {"vector": [[9, 9, 9], [1, 0, 1], [9, 9, 9], None]}, None, False,
         "ids 3, in 'vector'", {"differing": 1}),
        (golden(ONE_MORE), {}, None, False, "2 of 3 expected ids are in the output", {"found": 2}),
        (golden(ONE_MORE), {}, "a", True, "2 of 3 expected ids are in the output", {"found": 2}),
        (golden(NONE_OF_THEM), {}, "a", True, "0 of 2 expected ids", {"found": 0}),
        (golden(), {"score": [0, 0.1, 0, 0.301]}, None, False, "differ", {}),
        (golden(tolerance=0.002), {"score": [0, 0.1, 0, 0.301]}, None, True,
         "", {}),
        (golden({"id": [1], "score": [math.inf]}), {"score": [0, 1e12, 0, 0]}, None, False, "",
         {}),
    ],
)  # fmt: skip
def test_golden_rows(
    tmp_path: Path, check: Any, changed: Any, partition: str | None, passed: bool,
    described: str, metadata: Any
):  # fmt: skip
    """In all partitions together: a partition may lack some."""
    context = stage(tmp_path, actual(**changed), SCHEMA.empty_table())
    context = replace(context, _manifest=replace(context._manifest, partition=partition))
    found = one(check, context)
    assert found.passed == passed, found
    assert described in found.description
    assert {**found.metadata, **metadata} == found.metadata
    for difference in found.metadata.get("differences", ()):
        assert difference["id"] in "13"
        assert difference["expected"] != difference["actual"]


@pytest.mark.parametrize(
    ("expected", "passed"),
    [
        ([[[1, 2], [3, 4]]], True),
        ([[1, 2, 3, 4]], True),
        ([[[1, 2], [3, 5]]], False),
    ],
)
def test_golden_tensors_are_flat_or_nested_lists(tmp_path: Path, expected: Any, passed: bool):
    schema = pa.schema({"id": pa.int64(), "square": vd.tensor("float32", (2, 2))})
    squares = pa.FixedSizeListArray.from_arrays(pa.array([*range(9)][1:], pa.float32()), 4)
    tensors = pa.ExtensionArray.from_storage(schema.field("square").type, squares)
    context = stage(tmp_path, pa.table([[0, 1], tensors], schema=schema), schema.empty_table())
    assert one(golden({"id": [0], "square": expected}), context).passed is passed


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"key": [1], "text": ["a"]}, "no column 'id'"),
        ({"id": [1, 1], "text": ["a", "a"]}, "repeated"),
        ({"id": [1, None], "text": ["a", "a"]}, "null"),
        ({"id": [1], "score": ["a"]}, "'score' is double"),
    ],
)
def test_golden_sets_that_do_not_fit_fail(tmp_path: Path, expected: Any, message: str):
    found = one(golden(expected), stage(tmp_path, actual()))
    assert not found.passed
    assert message in found.metadata["error"]


@dataclass(frozen=True)
class LongTexts(vd.checks.Check):
    """Few texts are long. More follows."""

    column: str

    def evaluate(self, context: vd.checks.CheckContext) -> vd.checks.CheckOutcome:
        longest = max(
            len(text) for batch in context.batches([self.column]) for text in batch[0].to_pylist()
        )
        return vd.checks.CheckOutcome(longest < 9, metadata={"longest": longest})


@dataclass(frozen=True)
class Returns(vd.checks.Check):
    value: Any = field(default=None, hash=False)

    def evaluate(self, context: vd.checks.CheckContext) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value(context) if callable(self.value) else self.value


def stored(**columns: Any) -> CheckContext:
    """A partition in memory, as one that an earlier release has written without statistics."""
    table = pa.table({"id": range(len(next(iter(columns.values())))), **columns})

    def dataset() -> Any:
        import pyarrow.dataset as ds

        return ds.dataset(table)

    manifest = Manifest(
        "p", "s", "b", 0, "", "", table.schema, (), (), (), {}, "run", 0.0, keys=("id",)
    )
    return CheckContext("id", manifest.schema, manifest, dataset)


def result(value: Any, **kwargs: Any) -> CheckResult:
    (found,) = evaluate([Returns(value, **kwargs)], stored(x=[1]))
    return found


def test_the_example_of_the_documentation_works():
    text = textwrap.dedent((vd.checks.__doc__ or "").split("::\n")[1].split("docs.map_batches")[0])
    scope: dict[str, Any] = {"__name__": __name__}
    exec(text, scope)
    check = scope["LongTexts"]("text", max_characters=8)
    (found,) = evaluate([check], stored(text=["a" * 9, "b", None]))
    assert (found.passed, found.description) == (False, "1 of 3 texts are too long")


def test_a_result_without_a_description_has_the_requirement_or_the_metadata():
    (found,) = evaluate([LongTexts("text")], stored(text=["a"]))
    assert found.description == "Few texts are long. More follows"
    (found,) = evaluate([LongTexts("text")], stored(text=["a" * 99]))
    assert (found.passed, found.description) == (False, "longest: 99")
    metadata = {"long": np.int64(3), "rows": [{"id": 1}], "share": 0.5}
    assert result(vd.checks.CheckOutcome(False, metadata=metadata)).description == (
        "long: 3, share: 0.5"
    )


class WithoutText(Exception):
    def __str__(self) -> str:
        raise KeyError("inside")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (WithoutText(), "WithoutText"),
        (SystemExit(3), "SystemExit: 3"),
        (True, "expected evaluate to return vd.checks.CheckOutcome"),
        # Wrong types are what is refused.
        (vd.checks.CheckOutcome(None), "expected evaluate to return"),  # type: ignore[arg-type]  # refused
        (vd.checks.CheckOutcome(True, severity="BAD"), "severity is 'BAD'"),  # type: ignore[arg-type]  # refused
        (vd.checks.CheckOutcome(True, metadata={"a": [object()]}), "metadata has a object"),
        (lambda context: context.previous(), "set compares = True in its class"),
        (lambda context: context.batches(["y"]), "the stage has no column 'y'"),
    ],
)
def test_what_is_wrong_in_a_check_fails_the_check(value: Any, error: str):
    found = result(value)
    assert not found.passed
    assert error in found.description
    assert error in found.metadata["error"]
    assert found.definition == "", "it is evaluated again"


def test_values_of_numpy_and_numbers_without_json_are_stored():
    metadata = {"n": np.int64(3), "share": np.float32(0.5), "nan": math.nan, "rows": [{"id": 1}]}
    # NumPy's booleans are accepted, but not declared.
    found = result(vd.checks.CheckOutcome(np.bool_(True), "fine", metadata))  # type: ignore[arg-type]  # numpy bool
    assert found.passed is True
    assert found.metadata == {"n": 3, "share": 0.5, "nan": "nan", "rows": [{"id": 1}]}
    assert [type(value) for value in found.metadata.values()] == [int, float, str, list]
    warned = vd.checks.CheckOutcome(False, severity="WARN")
    assert [result(warned, blocking=each).severity for each in (False, True)] == ["WARN", "ERROR"]


def test_a_context_has_rows_statistics_and_the_previous_partition():
    context = stored(x=[1, None, 3], text=["a", "", None])
    assert context.partition == "b"
    assert [batch.to_pydict() for batch in context.batches(["text"])] == [{"text": ["a", "", None]}]
    assert context.lookup(pa.array([2]), ["x"]).to_pydict() == {"id": [2], "x": [3]}
    assert [b.num_rows for b in context.sample(["x", "text"], 2)] == [2]
    assert context.keys == ("id",)

    @dataclass(frozen=True)
    class Compares(Returns):
        compares = True

    previous: list[Any] = []

    def look(given: vd.checks.CheckContext) -> vd.checks.CheckOutcome:
        previous.append(given.previous())
        return vd.checks.CheckOutcome(True)

    evaluate([Compares(look)], replace(context, _previous=lambda: context))
    assert previous == [context]


MODULE = """
from dataclasses import dataclass
import vane_dagster as vd
LIMIT = 3

def far(value):
    return value > LIMIT

@dataclass(frozen=True)
class Far(vd.checks.Check):
    column: str = "x"

    def evaluate(self, context):
        return vd.checks.CheckOutcome(far(4))

class Lenient(vd.checks.NullRate):
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(tmp_path))
    count = iter(range(100))

    def load(text: str) -> Any:
        (tmp_path / "their_checks.py").write_text(f"{text}{' ' * next(count)}")
        sys.modules.pop("their_checks", None)
        importlib.invalidate_caches()
        return importlib.import_module("their_checks")

    yield load
    sys.modules.pop("their_checks", None)


def test_a_definition_follows_the_code_and_the_fields(module: Any):
    before = module(MODULE).Far().definition
    assert len(before) == 16
    assert int(before, 16) >= 0
    assert module(MODULE + "# a comment").Far().definition == before
    for edited in (
        MODULE.replace("far(4)", "far(5)"),
        MODULE.replace("LIMIT = 3", "LIMIT = 2"),
        MODULE.replace("value > LIMIT", "value >= LIMIT"),
    ):
        assert module(edited).Far().definition != before
    context = stored(x=[1])
    check = module(MODULE).Far()
    manifest = replace(context._manifest, checks=evaluate([check], context))
    assert results_for([check], manifest)["far"].passed
    edited = module(MODULE.replace("far(4)", "far(1)")).Far()
    assert results_for([edited], manifest) == {}, "a stored result counts until an edit"
    assert not evaluate([edited], context)[0].passed
    far = module(MODULE).Far
    others = [far("y"), far(name="other"), far(blocking=True), far(severity="WARN")]
    assert len({before, *(check.definition for check in others)}) == 5
