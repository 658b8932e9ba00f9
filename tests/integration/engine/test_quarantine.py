"""Failing rows: found by halving, quarantined or kept as nulls, bounded and reported."""

from __future__ import annotations

import asyncio
import os
import time

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.bad_row_runs import ROWS, pipeline
from support.bad_rows import BAD, double
from support.data import read_stage
from support.results import failure, metadata


def double_late(batch: pa.Table, bad=BAD) -> pa.Table:
    """Fails when the other fragments have had time to be written."""
    if set(bad) & set(batch["x"].to_pylist()):
        time.sleep(1.5)
    return double(batch, bad)


def by_row(batch: pa.Table, folder: str, bad=BAD) -> pa.Table:
    """Tells which rows fail: some for good, and the sevens at their first time."""
    xs, errors = batch["x"].to_pylist(), {}
    for place, x in enumerate(xs):
        with open(f"{folder}/asked", "a") as asked:
            asked.write(f"{x}\n")
        if x in bad:
            errors[place] = ValueError(f"cannot double {x}")
        elif x % 10 == 7 and not os.path.exists(f"{folder}/{x}"):
            open(f"{folder}/{x}", "w").close()
            errors[place] = ConnectionResetError("peer went away")
    if errors:
        others = [2 * x for place, x in enumerate(xs) if place not in errors]
        raise vd.RowErrors(errors, {"y": others} if others else None)
    return double(batch, bad=())


async def by_row_later(batch: pa.Table, folder: str, bad=BAD) -> pa.Table:
    await asyncio.sleep(0)
    return by_row(batch, folder, bad)


class Fixed:
    """Fails at some rows as long as a file is not there; tells which rows it was given."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, batch: pa.Table) -> pa.Table:
        with open(f"{self.folder}/seen", "a") as file:
            file.write("".join(f"{x}\n" for x in batch["x"].to_pylist()))
        return double(batch, () if os.path.exists(f"{self.folder}/fixed") else BAD)


def test_rows_at_fault_go_aside_and_are_tried_again_alone(tmp_path, local, materialize):
    given = {"folder": str(tmp_path)}
    docs = pipeline(tmp_path, fn=Fixed, batch_size=10, columns=["x"], fn_constructor_kwargs=given)
    docs["double"].project("below", {"z": "y + 1"})
    store, seen = tmp_path / "store", tmp_path / "seen"

    result = materialize(docs, local)

    good = [i for i in range(ROWS) if i not in BAD]
    table = read_stage(store, "docs", "double")
    assert table.select(["id", "y"]).to_pydict() == {"id": good, "y": [2 * i for i in good]}
    assert read_stage(store, "docs", "below")["id"].to_pylist() == good
    aside = vd.quarantine("docs/double", store=str(store))
    assert aside["id"].to_pylist() == list(BAD)
    first = aside.slice(0, 1).to_pylist()[0]
    assert first["stage"] == "docs/double"
    assert (first["error"], first["message"]) == ("ValueError", "cannot double 3")
    assert "raise ValueError" in first["traceback"]
    assert (first["attempts"], first["run_id"]) == (1, result.run_id)
    assert first["model"] == "Fixed"
    assert first["worker"]
    assert "rows 0 to 50" in first["fragment"]
    assert metadata(result, "double")["rows_quarantined"] == len(BAD)
    manifest = vd.FragmentStore(root=str(store)).open().in_force("docs", "double", None)
    assert [part.quarantined for part in manifest.parts] == [1, 2, 0, 1]
    rate = next(check for check in manifest.checks if check.name == "rows")
    assert rate.passed
    assert rate.metadata["error_rate"] == len(BAD) / ROWS

    seen.write_text("")
    again = {"retry_quarantined": True}
    materialize(docs, local, config=again)  # in vain
    assert {int(x) for x in seen.read_text().split()} == set(BAD)
    assert vd.quarantine("docs/double", store=str(store)).num_rows == len(BAD)
    seen.write_text("")
    (tmp_path / "fixed").touch()
    result = materialize(docs, local, config=again)
    assert {int(x) for x in seen.read_text().split()} == set(BAD)
    assert metadata(result, "double")["fragments_computed"] == 3
    assert metadata(result, "double")["fragments_reused"] == 1
    assert metadata(result, "below")["fragments_reused"] == 1
    assert read_stage(store, "docs", "double")["y"].to_pylist() == [2 * i for i in range(ROWS)]
    assert read_stage(store, "docs", "below")["z"].to_pylist() == [2 * i + 1 for i in range(ROWS)]
    assert vd.quarantine("docs/double", store=str(store)).num_rows == 0
    seen.write_text("")
    result = materialize(docs, local, config=again)
    assert metadata(result, "double")["fragments_computed"] == 0
    assert not seen.read_text()


def test_raise_names_the_batch_and_keeps_what_is_finished(tmp_path, local, materialize):
    bad = {"fn": double_late, "fn_kwargs": {"bad": (153,)}, "batch_size": 20}
    docs = pipeline(tmp_path, on_error="raise", **bad)
    message = failure(materialize(docs, local, raises=False))
    assert "stage 'docs/double'" in message
    assert "in a batch of 20 rows, ids 150, 151, 152, 153, 154 and 15 more: ValueError" in message
    assert "def double" not in message
    assert 'raise ValueError(f"cannot double {poison[0]}")' in message
    tolerant = pipeline(tmp_path, **bad)
    result = materialize(tolerant, local)
    assert metadata(result, "double")["fragments_reused"] >= 1
    assert read_stage(tmp_path / "store", "docs", "double").num_rows == ROWS - 1


@pytest.mark.parametrize(("fn", "on_error"), [(by_row, "quarantine"), (by_row_later, "null")])
def test_rows_that_a_call_says_have_failed_cost_nothing_of_the_others(
    fn, on_error, tmp_path, local, materialize
):
    (tmp_path / "notes").mkdir()
    given = {"folder": str(tmp_path / "notes")}
    docs = pipeline(tmp_path, fn=fn, fn_kwargs=given, on_error=on_error, batch_size=20, version="1")

    materialize(docs, local)

    rows = read_stage(tmp_path / "store", "docs", "double")
    kept = [x for x in range(ROWS) if on_error == "null" or x not in BAD]
    assert rows["id"].to_pylist() == kept
    assert rows["y"].to_pylist() == [None if x in BAD else 2 * x for x in kept]
    if on_error == "null":
        wrong = [f"ValueError: cannot double {x}" if x in BAD else None for x in kept]
        assert rows["error"].to_pylist() == wrong
    aside = vd.quarantine("docs/double", store=str(tmp_path / "store"))
    assert sorted(aside["id"].to_pylist()) == list(BAD)
    assert set(aside["error"].to_pylist()) == {"ValueError"}
    attempts = [int(x) for x in (tmp_path / "notes" / "asked").read_text().split()]
    again = [x for x in range(ROWS) if x % 10 == 7 and x not in BAD]
    assert sorted(attempts) == sorted([*range(ROWS), *again])
