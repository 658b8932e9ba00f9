"""Failing rows: found by halving, quarantined or kept as nulls, bounded and reported."""

from __future__ import annotations

import asyncio
import os
import time

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.bad_row_runs import ROWS, pipeline
from support.bad_rows import BAD, OutOfMemoryError, double
from support.data import read_stage
from support.results import failure, metadata
from vane_dagster.storage.gc import GcPolicy, collect


def double_late(batch: pa.Table, bad=BAD) -> pa.Table:
    """Fails when the other fragments have had time to be written."""
    if set(bad) & set(batch["x"].to_pylist()):
        time.sleep(1.5)
    return double(batch, bad)


class Model:
    """Loses its device's memory with more than eight rows, as torch tells it."""

    def __init__(self, most: int = 8) -> None:
        self.most = most

    def __call__(self, batch: pa.Table) -> pa.Table:
        if len(batch) > self.most:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return double(batch, bad=())


def flaky(batch: pa.Table, folder: str) -> pa.Table:
    """The first call of all fails as a connection does."""
    try:
        os.close(os.open(f"{folder}/called", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return double(batch, bad=())
    raise ConnectionResetError("peer went away")


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


def test_rows_at_fault_go_aside_and_the_rest_passes(tmp_path, local, materialize):
    docs = pipeline(tmp_path, batch_size=20)
    docs["double"].project("below", {"z": "y + 1"})
    result = materialize(docs, local)
    store = tmp_path / "store"
    good = [i for i in range(ROWS) if i not in BAD]
    table = read_stage(store, "docs", "double")
    assert table["id"].to_pylist() == good
    assert table["y"].to_pylist() == [2 * i for i in good]
    assert read_stage(store, "docs", "below")["id"].to_pylist() == good
    aside = vd.quarantine("docs/double", store=str(store))
    assert aside["id"].to_pylist() == list(BAD)
    first = aside.slice(0, 1).to_pylist()[0]
    assert first["stage"] == "docs/double"
    assert first["error"] == "ValueError"
    assert first["message"] == "cannot double 3"
    assert "raise ValueError" in first["traceback"]
    assert first["attempts"] == 1
    assert first["run_id"] == result.run_id
    assert first["model"] == "double"
    assert first["worker"]
    assert "rows 0 to 50" in first["fragment"]
    found = metadata(result, "double")
    assert found["rows_quarantined"] == len(BAD)
    manifest = vd.FragmentStore(root=str(store)).open().in_force("docs", "double", None)
    assert [part.quarantined for part in manifest.parts] == [1, 2, 0, 1]
    rate = next(check for check in manifest.checks if check.name == "rows")
    assert rate.passed
    assert rate.metadata["error_rate"] == len(BAD) / ROWS


class Fixed:
    """Fails at some rows as long as a file is not there; tells which rows it was given."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, batch: pa.Table) -> pa.Table:
        with open(f"{self.folder}/seen", "a") as file:
            file.write("".join(f"{x}\n" for x in batch["x"].to_pylist()))
        return double(batch, () if os.path.exists(f"{self.folder}/fixed") else BAD)


def test_rows_that_failed_are_tried_again_alone(tmp_path, local, materialize):
    docs = pipeline(
        tmp_path,
        fn=Fixed,
        batch_size=10,
        columns=["x"],
        fn_constructor_kwargs={"folder": str(tmp_path)},
    )
    docs["double"].project("below", {"z": "y + 1"})
    materialize(docs, local)
    seen = tmp_path / "seen"
    seen.write_text("")
    again = {"retry_quarantined": True}
    result = materialize(docs, local, config=again)  # in vain
    assert {int(x) for x in seen.read_text().split()} == set(BAD)
    assert vd.quarantine("docs/double", store=str(tmp_path / "store")).num_rows == len(BAD)
    seen.write_text("")
    (tmp_path / "fixed").touch()
    result = materialize(docs, local, config=again)
    assert {int(x) for x in seen.read_text().split()} == set(BAD)
    assert metadata(result, "double")["fragments_computed"] == 3
    assert metadata(result, "double")["fragments_reused"] == 1
    assert metadata(result, "below")["fragments_reused"] == 1
    store = tmp_path / "store"
    table = read_stage(store, "docs", "double")
    assert table["id"].to_pylist() == list(range(ROWS))
    assert table["y"].to_pylist() == [2 * i for i in range(ROWS)]
    assert read_stage(store, "docs", "below")["z"].to_pylist() == [2 * i + 1 for i in range(ROWS)]
    assert vd.quarantine("docs/double", store=str(store)).num_rows == 0
    seen.write_text("")
    for config in (None, again):
        result = materialize(docs, local, config=config)
        assert metadata(result, "double")["fragments_computed"] == 0
    assert not seen.read_text()


def test_without_row_keys_the_fragments_of_rows_that_failed_are_computed_again(
    tmp_path, local, materialize
):
    docs = pipeline(tmp_path, fn=Fixed, fn_constructor_kwargs={"folder": str(tmp_path)})
    materialize(docs, local)
    seen, store = tmp_path / "seen", tmp_path / "store"
    seen.write_text("")
    (tmp_path / "fixed").touch()
    result = materialize(docs, local, config={"retry_quarantined": True})
    assert metadata(result, "double")["fragments_computed"] == 3
    assert metadata(result, "double")["fragments_reused"] == 1
    assert len(seen.read_text().split()) == 150
    assert read_stage(store, "docs", "double")["y"].to_pylist() == [2 * i for i in range(ROWS)]
    assert vd.quarantine("docs/double", store=str(store)).num_rows == 0


def words(batch: pa.Table, folder: str) -> pa.Table:
    """Two children a row; row 3 fails as long as a file is not there."""
    if 3 in batch["id"].to_pylist() and not os.path.exists(f"{folder}/fixed"):
        raise ValueError("no words")
    ids = [i for i in batch["id"].to_pylist() for _ in range(2)]
    return pa.table({"id": ids, "word": ["w"] * len(ids)})


def test_children_of_a_row_that_failed_go_aside_together_and_take_their_place(
    tmp_path, local, materialize
):
    many = {"schema": {"word": "VARCHAR"}, "cardinality": vd.Children("word_id")}
    docs = pipeline(tmp_path, fn=words, fn_kwargs={"folder": str(tmp_path)}, **many)
    materialize(docs, local)
    table = read_stage(tmp_path / "store", "docs", "double")
    assert table["id"].to_pylist() == [i for i in range(ROWS) if i != 3 for _ in range(2)]
    assert vd.quarantine("docs/double", store=str(tmp_path / "store"))["id"].to_pylist() == [3]
    (tmp_path / "fixed").touch()
    materialize(docs, local, config={"retry_quarantined": True})
    table = read_stage(tmp_path / "store", "docs", "double")
    assert table["id"].to_pylist() == [i for i in range(ROWS) for _ in range(2)]
    assert len(set(table["word_id"].to_pylist())) == 2 * ROWS


def test_garbage_collection_keeps_what_was_set_aside(tmp_path, local, materialize):
    docs = pipeline(tmp_path)
    materialize(docs, local)
    store = vd.FragmentStore(root=str(tmp_path / "store"))

    def files() -> set[str]:
        return {path.name for path in (tmp_path / "store").rglob("*.faults.parquet")}

    def collected() -> None:
        now = time.time() + 10
        for grace in (0, 1):
            list(collect(store.open(), GcPolicy(now + 100 * grace, keep=0, grace=50)))

    first = files()
    collected()
    assert files() == first
    assert vd.quarantine("docs/double", store=store)["id"].to_pylist() == list(BAD)
    materialize(docs, local, config={"force": True})
    assert files() > first
    collected()
    assert not files() & first
    assert vd.quarantine("docs/double", store=store)["id"].to_pylist() == list(BAD)


def test_rows_are_kept_as_nulls_with_their_error(tmp_path, local, materialize):
    docs = pipeline(tmp_path, on_error="null", batch_size=20)
    materialize(docs, local)
    table = read_stage(tmp_path / "store", "docs", "double")
    assert table.schema.names == ["id", "y", "error"]
    assert table["id"].to_pylist() == list(range(ROWS))
    assert table["y"].to_pylist() == [None if i in BAD else 2 * i for i in range(ROWS)]
    assert table["error"].to_pylist() == [
        f"ValueError: cannot double {i}" if i in BAD else None for i in range(ROWS)
    ]
    aside = vd.quarantine("docs/double", store=str(tmp_path / "store"))
    assert aside["id"].to_pylist() == list(BAD)


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


def test_memory_that_runs_out_halves_the_batch(tmp_path, local, materialize):
    docs = pipeline(tmp_path, fn=Model, batch_size=50, on_error="raise")
    result = materialize(docs, local)
    assert read_stage(tmp_path / "store", "docs", "double").num_rows == ROWS
    assert metadata(result, "double")["batch_size"] == 6
    calls = metadata(result, "double")["batches"]
    assert calls < ROWS / 6 + 20  # the worker remembers, and does not try 50 rows each time


def test_an_error_that_may_pass_is_tried_again(tmp_path, local, materialize):
    docs = pipeline(
        tmp_path, fn=flaky, fn_kwargs={"folder": str(tmp_path)}, on_error="raise", batch_size=50
    )
    result = materialize(docs, local)
    assert read_stage(tmp_path / "store", "docs", "double").num_rows == ROWS
    assert metadata(result, "double")["retries"] == 1


# Errors by row


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
    aside = vd.quarantine("docs/double", store=str(tmp_path / "store"))
    assert sorted(aside["id"].to_pylist()) == list(BAD)
    assert set(aside["error"].to_pylist()) == {"ValueError"}
    attempts = [int(x) for x in (tmp_path / "notes" / "asked").read_text().split()]
    again = [x for x in range(ROWS) if x % 10 == 7 and x not in BAD]
    assert sorted(attempts) == sorted([*range(ROWS), *again])


def test_a_row_that_a_call_says_has_failed_fails_the_partition(tmp_path, local, materialize):
    (tmp_path / "notes").mkdir()
    given = {"folder": str(tmp_path / "notes")}
    docs = pipeline(tmp_path, fn=by_row, fn_kwargs=given, on_error="raise", version="1")

    message = failure(materialize(docs, local, raises=False))

    assert "in a batch of 1 rows, ids " in message
    assert "ValueError: cannot double" in message
