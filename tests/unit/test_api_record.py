"""The record of the public API: removals are refused, additions are recorded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_FILE = Path(__file__).resolve().parents[2] / "tools" / "api.py"
_SPEC = importlib.util.spec_from_file_location("api_tool", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
api = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(api)

RECORDED = ["vd.table", "vd.table: data, position 1, required", "vd.table: allow_empty = False"]


@pytest.mark.parametrize(
    ("found", "gone", "added"),
    [
        (RECORDED, [], []),
        ([*RECORDED, "vd.table: new = None", "vd.other", "vd.other: x, required"], [],
         ["vd.other", "vd.other: x, required", "vd.table: new = None"]),
        (RECORDED[:2], ["vd.table: allow_empty = False"], []),
        ([*RECORDED[:2], "vd.table: allow_empty = True"], ["vd.table: allow_empty = False"],
         ["vd.table: allow_empty = True"]),
        ([*RECORDED, "vd.table: new, required"], ["vd.table: new, required (new)"], []),
    ],
)  # fmt: skip
def test_a_removal_names_the_policy_and_an_addition_asks_to_record_it(found, gone, added):
    text = api.differences(RECORDED, found)
    assert [line[2:] for line in text.splitlines() if line.startswith("  ")] == gone + added
    assert ("with a DeprecationWarning" in text) == bool(gone)
    assert ("Added, which is fine" in text) == bool(added)
