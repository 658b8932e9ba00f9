"""NaN in Parquet files, whose statistics leave it out."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from vane_dagster.sources import FragmentRule, ReadContext

FILTERS = {
    "isnan(x)": [3],
    "NOT isnan(x)": [1, 2],
    "x < 0.5": [1, 2],
    "x > 0.5": [3],
    "x = 'nan'::DOUBLE": [3],
    "isnan(s.x)": [3],
    "s.x < 0.5": [1, 2],
    "isnan(l[1])": [3],
}


@pytest.mark.parametrize("where", FILTERS)
def test_filters_see_nan(where: str, tmp_path: Path) -> None:
    values = [0.1, 0.2, math.nan, None]
    table = pa.table({
        "id": [1, 2, 3, 4], "x": values, "s": [{"x": value} for value in values],
        "l": [[value] for value in values],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet")
    source = vd.parquet(str(tmp_path))
    files = source.required(source.list_files([None], "here")[None], None, "here")
    (fragment,) = source.split(files, FragmentRule(10), "here").fragments
    columns = [("id", "id"), ("nan", "isnan(x)"), ("x", "x")]
    found = source.project(fragment, table.schema, columns, where, ReadContext("here"))
    assert found is not None
    assert found["id"].to_pylist() == FILTERS[where]
    assert found["nan"].to_pylist() == [row == 3 for row in FILTERS[where]]
    assert [math.isnan(x) for x in found["x"].to_pylist()] == found["nan"].to_pylist()
