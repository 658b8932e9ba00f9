"""Samples of rows that are computed again: how they are drawn and compared."""

from __future__ import annotations

import importlib.metadata
import math
from datetime import date
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vane_dagster as vd
from vane_dagster.checks.builtin import PackagesUnchanged
from vane_dagster.checks.comparison import OUTCOME, compare
from vane_dagster.checks.context import RowOutcomes
from vane_dagster.checks.partition import CheckContext
from vane_dagster.engine.recompute import read_row_outcomes
from vane_dagster.errors import DefinitionError
from vane_dagster.planning.sample_plan import MAX_FRAGMENTS, choose
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import Manifest, PartInfo, PartProvenance
from vane_dagster.storage.packages import distributions, installed
from vane_dagster.storage.part_file import PartTarget, write_part

# The declaration


def test_a_write_stage_has_no_rows_of_its_own(tmp_path):
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path)), id="id")
    labels = docs.project("labels", ["id"])
    with pytest.raises(DefinitionError, match="add the check to the stage that is published"):
        labels.write(
            "out", str(tmp_path / "out"), asset=vd.Asset(checks=[vd.checks.Reproducible()])
        )


# The sample


@given(
    counts=st.lists(st.integers(0, 50), max_size=12),
    rows=st.integers(1, 60),
    seed=st.integers(0, 2**32),
)
def test_rows_are_sampled_from_few_fragments(counts, rows, seed):
    chosen = choose(dict(enumerate(counts)), rows, seed)
    assert len(chosen) <= MAX_FRAGMENTS
    assert all(places for places in chosen.values())
    for index, places in chosen.items():
        assert list(places) == sorted(set(places))
        assert all(0 <= place < counts[index] for place in places)
    few = sorted(count for count in counts if count)[:MAX_FRAGMENTS]
    assert min(rows, sum(few)) <= sum(map(len, chosen.values())) <= rows
    assert choose(dict(enumerate(counts)), rows, seed) == chosen


def test_a_fragment_is_sampled_by_its_rows():
    counts = dict(enumerate([10_000] + 99 * [1]))
    assert all(0 in choose(counts, 20, seed) for seed in range(50))


# The comparison


def outcomes(rows: Any, failed: Any = None) -> RowOutcomes:
    schema = pa.schema({"id": pa.int64(), "x": pa.int64()}) if not rows else None
    return RowOutcomes(pa.Table.from_pylist(rows, schema), "id", failed or {})


def apart(stored: Any, computed: Any, tolerance: float = 1e-5) -> list[tuple[str, str, str]]:
    made = [outcomes([{"id": 1, "x": x}]) for x in (stored, computed)]
    found = compare(*made, [1], None, tolerance)
    return [(each.column, each.before, each.now) for each in found]


def test_a_column_named_error_is_compared_as_any_other():
    """A failed row of on_error="null" is compared by its failure; others have no error."""
    made = [outcomes([{"id": 1, "error": x}]) for x in ("old", "new")]
    (found,) = compare(*made, [1], None, 0.0)
    assert (found.column, found.before, found.now) == ("error", "'old'", "'new'")


def test_a_value_is_itself():
    values: list[Any] = [True, None, b"\x00", math.nan, math.inf, [1.0, math.nan], {"a": [1]}, []]
    for value in (*values, {"a": math.nan, "b": [{"c": None}]}, [[math.nan], None]):
        assert apart(value, value) == []


@pytest.mark.parametrize(
    ("stored", "computed", "shown"),
    [
        (1, 1.5, ("1", "1.5")),
        (1, "1", ("1", "'1'")),
        (None, 0, ("null", "0")),
        ("ab", "ac", ("'ab'", "'ac'")),
        (math.inf, -math.inf, ("inf", "-inf")),
        ([1.0, 2.0], [1.0, 2.5], ("[1.0, 2.0]", "[1.0, 2.5]")),
        ([7] * 99, [*[7] * 98, None], (f"...{'7, ' * 8}7]", f"...{'7, ' * 8}None]")),
        (["a"] * 99, ["b"] * 99, (f"{str(['a'] * 99)[:60]}...", f"{str(['b'] * 99)[:60]}...")),
        ([1.0], [1.0, 2.0], ("[1.0]", "[1.0, 2.0]")),
        ([1.0], None, ("[1.0]", "null")),
        (date(2026, 1, 1), date(2026, 1, 2), ("2026-01-01", "2026-01-02")),
        ({"a": 1, "b": "x"}, {"a": 1, "b": "y"}, ("{'a': 1, 'b': 'x'}", "{'a': 1, 'b': 'y'}")),
    ],
)
def test_a_difference_is_shown_where_it_is(stored, computed, shown):
    assert apart(stored, computed) == [("x", *shown)]


@pytest.mark.parametrize(
    ("stored", "computed", "tolerance", "same"),
    [
        (0.0, -0.0, 0, True),
        (math.nan, math.nan, 0, True),
        (math.nan, None, 0, False),
        (1, 1.0, 0, True),
        (100.0, 100.0009, 1e-5, True),
        (100.0, 100.002, 1e-5, False),
        (1.0, math.nextafter(1.0, 2.0), 0.0, False),
        ([0.0, 1.0], [0.0, 1.000001], 1e-5, True),
        ({"a": [0.0, 1.0]}, {"a": [0.0, 1.000001]}, 1e-5, True),
        ({"a": math.nan}, {"a": -math.nan}, 0, True),
        (1, 2, 5.0, False),
    ],
)
def test_the_tolerance_is_for_floating_point_numbers(stored, computed, tolerance, same):
    assert (apart(stored, computed, tolerance) == []) is same


def test_rows_that_fail_or_are_left_out_are_compared_by_what_became_of_them():
    rows = {id: {"id": id, "x": 1} for id in range(6)}
    made = outcomes([rows[1], rows[2], rows[5], rows[5]], {3: "ValueError", 4: "ValueError"})
    again = outcomes([rows[1], rows[3], rows[5]], {2: "KeyError", 4: "KeyError"})
    found = compare(made, again, [1, 2, 3, 4, 5, 6], None, 0.0)
    assert [(each.id, each.column, each.before, each.now) for each in found] == [
        (2, OUTCOME, "1 row", "failed: KeyError"),
        (3, OUTCOME, "failed: ValueError", "1 row"),
        (5, OUTCOME, "2 rows", "1 row"),
    ]


def test_rows_are_matched_by_the_id_of_their_input_row_and_then_by_their_order():
    made = outcomes([{"id": 2, "x": 1}, {"id": 1, "x": 2}, {"id": 2, "x": 3}])
    again = outcomes([{"id": 1, "x": 2}, {"id": 2, "x": 1}, {"id": 2, "x": 4}])
    (found,) = compare(made, again, [1, 2], None, 0.0)
    assert (found.id, found.column, found.before, found.now) == (2, "x", "3", "4")
    assert compare(made, again, [1, 3], ["x"], 0.0) == []
    assert compare(outcomes([]), outcomes([]), [1, 2], None, 0.0) == []


def test_a_column_that_one_side_lacks_is_null():
    made = outcomes([{"id": 1, "x": 1}, {"id": 2, "x": None}])
    again = RowOutcomes(pa.table({"id": [1, 2]}), "id", {})
    (found,) = compare(made, again, [1, 2], None, 0.0)
    assert (found.id, found.column, found.before, found.now) == (1, "x", "1", "null")


def test_values_that_python_has_not_are_shown_as_texts(tmp_path):
    """A timestamp may lie after the year 9999."""
    folder = StoragePath(str(tmp_path))
    ids = pa.array([1, 2])
    outcomes = []
    for seconds in ([1, 400_000_000_000], [1, 400_000_000_060]):
        table = pa.table({"id": ids, "at": pa.array(seconds, pa.timestamp("s"))})
        part = write_part(table, PartTarget(folder, "0" * 40, "id"))
        outcomes.append(read_row_outcomes(folder, part, "id", ids))
    assert compare(outcomes[0], outcomes[0], [1, 2], None, 0.0) == []
    (found,) = compare(*outcomes, [1, 2], None, 0.0)
    assert found.id == 2
    assert "14645-" in found.before


def part(run_id: str, *packages: str) -> PartInfo:
    made = PartProvenance(run_id, ("w",), 1.0, 2.0, packages)
    return PartInfo("0" * 40, "1" * 16, 1, 1, rows_in=1, made=made)


def test_the_check_of_packages_names_the_versions_then_and_now():
    parts = [part("old", "numpy==1.0")] * 2
    manifest = Manifest("p", "s", None, 0, "", "", None, (), parts, (), {}, "run", 0.0)
    check = PackagesUnchanged()
    found = check.evaluate(CheckContext("id", None, manifest, lambda: None, _run_id="new"))
    assert (found.passed, check.severity) == (False, "WARN")
    now = importlib.metadata.version("numpy")
    assert f"numpy is {now} but was 1.0 when stored rows" in found.description
    assert (found.metadata["then/numpy"], found.metadata["now/numpy"]) == ("1.0", now)


def test_modules_are_told_by_the_packages_that_they_are_in():
    assert distributions(["sklearn", "numpy", "vane_dagster"]) == ("numpy", "scikit-learn")
    assert distributions(["not_here"]) == ("not_here",)
    assert installed(["not_here"]) == ()
    assert installed(["numpy"]) == (f"numpy=={importlib.metadata.version('numpy')}",)
