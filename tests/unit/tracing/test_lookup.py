"""Rows of neighboring stages that belong together, and rows in the files of the source."""

from __future__ import annotations

import pytest

from vane_dagster.tracing.manifest_index import aligned


@pytest.mark.parametrize(
    ("rows", "depths", "found"),
    [
        ([("w1", 1), ("w2", 2)], (2, 2), (0, {"w1": ("w1", 1), "w2": ("w2", 2)})),
        ([("w1", 1), ("w2", 1), ("w3", 2)], (2, 1), (0, {1: (1,), 2: (2,)})),
        ([(1,), (2,)], (1, 2), (1, {1: None, 2: None})),
        ([("w1", 1)], (2, 3), (1, {"w1": None})),
    ],
    ids=["one depth", "many to one", "one to many", "many to more"],
)
def test_rows_of_neighboring_stages_correspond_by_their_keys(rows, depths, found):
    assert aligned(rows, *depths) == found
