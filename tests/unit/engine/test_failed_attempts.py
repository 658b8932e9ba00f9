"""Failed rows of a partition that a run gave up: stored, read, outdated by a commit, collected."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import vane_dagster as vd
from support.data import write_source
from support.in_process import InProcess, executed
from vane_dagster.cli.main import main
from vane_dagster.events import Committed, Failed, WorkerReplaced
from vane_dagster.providers.base import EndpointRefused
from vane_dagster.storage.gc import GcPolicy, collect

DAY = 24 * 3600
FIRST = ". Only its first failed rows are stored, and of equal rows one"


def checked(batch: pa.Table) -> dict[str, Any]:
    values = batch["n"].to_pylist()
    if any(n < 0 for n in values):
        raise ValueError(f"{values} is negative")
    return {"root": [n**0.5 for n in values]}


def by_itself(n: int) -> dict[str, Any]:
    if n < 0:
        raise ValueError(f"[{n}] is negative")
    return {"root": n**0.5}


def run(tmp_path, store, negative, run_id, version="1", by_row=False, **options) -> list[Failed]:
    """Compute 60 rows, of which some are negative; return what failed."""
    numbers = [-n if n < negative else n for n in range(1, 61)]
    folder = tmp_path / "src"
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": range(60), "n": numbers}), folder / "0.parquet")
    docs = vd.Pipeline("docs", source=vd.parquet(folder), id="id", fragment_rows=20)
    given = {"schema": {"root": "DOUBLE"}, "on_error": "quarantine", **options}
    given |= {"reuse": vd.Reuse(version=version)}
    if by_row:
        docs.map("root", by_itself, **given)
    else:
        docs.map_batches("root", checked, batch_size=4, **given)
    events = executed(docs, store, [None], InProcess(), run_id=run_id)
    return [each for each in events if isinstance(each, Failed)]


def ids(rows: pa.Table, committed: bool) -> list[int]:
    return sorted(r["id"] for r in rows.to_pylist() if r["committed"] is committed)


def test_rows_that_fail_again_do_not_cost_a_worker(tmp_path, store):
    write_source(tmp_path / "src", {"id": range(60), "n": [n % 10 - 1 for n in range(60)]})
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id", fragment_rows=10)
    docs.map("root", by_itself, schema={"root": "DOUBLE"}, on_error="quarantine")
    for retried in (False, True):
        events = executed(docs, store, [None], InProcess(), retry_quarantined=retried)
        (manifest,) = [each.manifest for each in events if isinstance(each, Committed)]
        assert manifest is not None
        assert [part.quarantined for part in manifest.parts] == [1] * 6
        assert not [each for each in events if isinstance(each, WorkerReplaced)]


@pytest.mark.parametrize("by_row", [False, True])
def test_its_failed_rows_can_be_looked_at_until_the_next_commit(tmp_path, store, by_row):
    place = store.root.path
    (failed,) = run(tmp_path, store, 20, "first", by_row=by_row)
    assert "`vane-dagster quarantine` lists" in " ".join(str(failed.error).split())
    rows = vd.quarantine("docs/root", store=place)
    found = ids(rows, False)
    assert len(found) > 10, "the first that failed"
    assert {*found} <= {*range(19)}
    assert ids(rows, True) == []
    first = rows.to_pylist()[0]
    assert (first["error"], first["run_id"], first["partition"]) == ("ValueError", "first", None)
    assert "is negative" in first["message"]
    assert "raise ValueError" in first["traceback"]

    assert not run(tmp_path, store, 3, "second", by_row=by_row)
    rows = vd.quarantine("docs/root", store=place)
    assert (ids(rows, True), ids(rows, False)) == ([0, 1], [])

    assert run(tmp_path, store, 30, "third", version="2", by_row=by_row)
    rows = vd.quarantine("docs/root", store=place)
    assert ids(rows, True) == [0, 1]
    assert len(ids(rows, False)) > 10
    assert {row["run_id"] for row in rows.to_pylist()} == {"second", "third"}


def test_a_row_that_fails_its_partition_is_kept_too(tmp_path, store):
    run(tmp_path, store, 2, "first", on_error="raise")
    with pytest.raises(vd.errors.StoreError, match="never materialized"):
        vd.quarantine("docs/root", store=store.root.path)  # a batch failed, and no row of it
    run(tmp_path, store, 2, "second", by_row=True, on_error="raise")
    assert ids(vd.quarantine("docs/root", store=store.root.path), False) == [0]


def test_the_command_lists_them_last_and_names_the_run(tmp_path, store):
    def listed(*words: str) -> str:
        done = CliRunner().invoke(main, ["quarantine", "docs/root", *words, "--store", place])
        assert done.exit_code == 0, done.output
        return done.stdout

    place = store.root.path
    run(tmp_path, store, 40, "first", version="0")  # nothing is committed yet
    assert listed().splitlines()[-1] == f"  not committed: run first failed{FIRST}"
    run(tmp_path, store, 3, "second")
    run(tmp_path, store, 40, "third", version="2")
    lines = listed().splitlines()
    assert lines[:2] == ["2 rows: ValueError: [-1] is negative", "  ids: 0, 1"]
    assert lines[2].endswith("rows: ValueError: [-1] is negative")
    assert lines[4:] == [
        f"  not committed: run third failed{FIRST}",
        "Retry them: vane-dagster quarantine docs/root --retry -f <your definitions>",
    ]
    groups = json.loads(listed("--json"))
    assert [group["failed_run"] for group in groups] == [None, "third"]


def test_they_are_collected(tmp_path, store):
    run(tmp_path, store, 40, "first")
    (file,) = tmp_path.glob("store/docs/root/failed/*/*.parquet")
    for days in (6, 8):
        assert file.exists()
        policy = GcPolicy(time.time() + days * DAY, keep=7 * DAY, grace=DAY)
        list(collect(store, policy))
    assert not file.exists()


def asked(n: int) -> int:
    """Fail like a server that is down: by row, or for the whole stage."""
    with open(os.environ["ASKED"], "a") as file:
        print(n, file=file)
    down = os.environ["DOWN"].split()
    if f"all-{n}" in down:
        raise vd.errors.StageError("down")
    if str(n) in down:
        raise ValueError("no answer")
    return n


def numbers(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().splitlines()]


@pytest.fixture
def attempt(tmp_path, store, monkeypatch):
    """Run 300 rows in 15 fragments, of which a run begins only the first, and return errors."""
    monkeypatch.setenv("BELOW", str(tmp_path / "below"))

    def attempted(*down: int | str, rows=300, below=False, id="id", **failures: Any) -> list[str]:
        if not (tmp_path / "src").exists():
            write_source(tmp_path / "src", {"id": range(300), "other": [n ^ 1 for n in range(300)]})
        (tmp_path / "asked").write_text("")
        monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
        monkeypatch.setenv("DOWN", " ".join(map(str, down)))
        source = vd.parquet(str(tmp_path / "src"))
        docs = vd.Pipeline("docs", source=source, id=id, fragment_rows=20)
        policy = vd.Failures("quarantine", **failures)
        above = docs if rows == 300 else docs.project("some", ["id"], where=f"id < {rows}")
        stage = above.map(
            "answer", asked, columns={"n": "id"}, include_columns=True, on_error=policy
        )
        stage.project("copy", ["answer"])
        if below:
            stage.map("below", again, columns={"answer": "answer"})
        events = executed(docs, store, [None], InProcess())
        return [str(each.error) for each in events if isinstance(each, Failed)]

    return attempted


def test_the_next_run_computes_failed_rows_again_and_no_others(attempt, store, tmp_path):
    computed: set[int] = set()
    for more in (range(280, 288), range(290, 293), range(297, 300), ()):
        errors = attempt(*(down := [*range(8), *more]))
        assert len(errors) == (2 if more else 0)
        assert all("the next run computes" in each for each in errors[:1])
        rows = numbers(tmp_path / "asked")
        assert not computed.intersection(rows), "asked again although they had an answer"
        computed |= {n for n in rows if n not in down and n < 280}  # its fragment is not stored
    assert computed == {*range(8, 280)}
    assert vd.quarantine("docs/answer", store=store.root.path)["id"].to_pylist() == [*range(8)]
    assert len(vd.load("docs/copy", store=store.root.path)) == 292
    assert attempt(*range(8)) == numbers(tmp_path / "asked") == [], "a commit ends it"


def test_failed_rows_that_a_killed_run_has_stored_count_once(attempt, store, tmp_path):
    attempt(*range(16), "all-299", max_error_rate=1.0)
    (file,) = tmp_path.glob("store/docs/answer/failed/*/*.parquet")
    file.unlink()  # as if the run had been killed before
    error, _ = attempt()
    assert "16 of 300 rows failed (5.333%); the limit is 10 rows" in error
    assert not {*numbers(tmp_path / "asked")} & {*range(16)}
    assert not attempt()
    assert {*numbers(tmp_path / "asked")} >= {*range(16)}
    assert not vd.quarantine("docs/answer", store=store.root.path).num_rows


def test_a_partition_whose_rows_all_failed_is_not_committed(attempt, store, tmp_path):
    for down in (range(8), range(8), ()):
        errors = attempt(*down, rows=8)
        assert all("8 of 8 rows failed (100%)" in each for each in errors[:1])
        assert all("the next run computes the failed rows again" in each for each in errors[:1])
        assert sorted(numbers(tmp_path / "asked")) == [*range(8)]
        assert (store.in_force("docs", "answer", None) is None) == bool(down)
    assert len(vd.load("docs/copy", store=store.root.path)) == 8
    assert attempt(rows=8) == numbers(tmp_path / "asked") == []


def test_answers_below_a_partition_that_was_given_up_are_copied(attempt, store, tmp_path):
    for more in (range(280, 288), range(290, 293), ()):
        errors = attempt(*range(8), *more, below=True)
        assert bool(errors) == bool(more)
    rows = vd.load("docs/below", store=store.root.path)["below"].to_pylist()
    assert sorted(rows) == [*range(8, 300)]
    asked = numbers(tmp_path / "below")
    repeated = {n for n, times in Counter(asked).items() if times > 1}
    assert repeated <= {*range(100, 280)}, "those of fragments that were in progress"


def test_rows_under_other_ids_are_not_copied(attempt, store):
    assert attempt(*range(8), *range(280, 288))
    assert not attempt(*range(8), id="other")
    rows = vd.load("docs/answer", store=store.root.path).to_pylist()
    assert all(row["answer"] == row["id"] == row["other"] ^ 1 for row in rows)


def test_failures_within_the_limit_are_not_repeated_after_another_error(attempt, tmp_path):
    for _ in range(2):
        assert attempt(*range(8), "all-290")
    assert not {*range(8)} & {*numbers(tmp_path / "asked")}


def again(answer: int) -> int:
    with open(os.environ["BELOW"], "a") as file:
        print(answer, file=file)
    return answer


def priced(text: str) -> str:
    """Read a service, which is down for some texts."""
    if text in os.environ["DOWN"]:
        raise ValueError("down")
    return f"{text}@{os.environ['DAY']}"


def shouted(price: str) -> str:
    return price.upper()


def run_of_day(tmp_path, store, day, down="", retry=False, **failures: Any) -> list[Failed]:
    """Compute one fragment for each letter; the first stage again in each run, if it is `none`."""
    os.environ |= {"DAY": day, "DOWN": down}
    source = vd.table([{"id": letter, "text": letter} for letter in "abcdefghijkl"])
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=1)
    reuse = "rows" if failures else "none"
    policy = vd.Failures(**{"on_error": "raise", "max_retries": 0, **failures})
    price = docs.map("price", priced, columns={"text": "text"}, reuse=reuse, on_error=policy)
    price.map("loud", shouted, columns={"price": "price"})
    answered = random.Random(1).randrange  # so that some fragments are far ahead
    events = executed(docs, store, [None], InProcess(answered), run_id=day, retry_quarantined=retry)
    return [each for each in events if isinstance(each, Failed)]


@pytest.fixture
def days(monkeypatch):
    monkeypatch.setenv("DAY", "")
    monkeypatch.setenv("DOWN", "")


def test_nothing_below_is_kept_from_a_failed_run_of_a_stage_without_reuse(tmp_path, store, days):
    """Two runs that come after the same commit have equal fragment keys."""
    assert not run_of_day(tmp_path, store, "monday")
    assert run_of_day(tmp_path, store, "tuesday", down="l")
    assert not run_of_day(tmp_path, store, "wednesday")
    loud = vd.load("docs/loud", store=store.root.path)["loud"].to_pylist()
    assert loud == [f"{letter}@WEDNESDAY" for letter in "ABCDEFGHIJKL"]


def test_nothing_is_kept_that_was_made_of_parts_about_to_be_deleted(tmp_path, store, days):
    assert run_of_day(tmp_path, store, "monday", down="l", on_error="raise")
    parts = [*tmp_path.glob("store/docs/price/parts/*/*.parquet")]
    assert [*tmp_path.glob("store/docs/loud/parts/*/*.parquet")]
    for part in parts:
        store.condemn("docs", "price", f"{part.parent.name}/{part.name}")
    assert not run_of_day(tmp_path, store, "tuesday", on_error="raise")
    loud = vd.load("docs/loud", store=store.root.path)["loud"].to_pylist()
    assert loud == [f"{letter}@TUESDAY" for letter in "ABCDEFGHIJKL"]


@pytest.mark.parametrize("still", ["a", "l"])
def test_a_retry_computes_rows_that_failed_in_a_run_without_a_commit(tmp_path, store, days, still):
    limit = {"on_error": "quarantine", "max_error_rate": 0.1}
    assert run_of_day(tmp_path, store, "monday", down="al", **limit)
    assert not run_of_day(tmp_path, store, "tuesday", down=still, retry=True, **limit)
    assert vd.quarantine("docs/price", store=store.root.path)["id"].to_pylist() == [still]
    parts = store.in_force("docs", "price", None).parts
    first, *between, last = [part.made.run_id for part in parts]
    assert (first, last) == ("tuesday", "tuesday")
    assert "monday" in between, "what did not fail is kept"
    assert vd.load("docs/loud", store=store.root.path).num_rows == 11


def refused(n: int) -> int:
    with open(os.environ["ASKED"], "a") as file:
        print(n, file=file)
    if n == 0:
        raise (EndpointRefused if os.environ["DOWN"] else vd.errors.StageError)("wrong key")
    return n


@pytest.mark.parametrize(("down", "failed"), [("", ["a"]), ("1", ["a", "b", "c"])])
def test_an_endpoint_that_refuses_all_ends_the_stage_in_all_partitions(
    down, failed, tmp_path, store, monkeypatch
):
    monkeypatch.setenv("DOWN", down)
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    (tmp_path / "asked").write_text("")
    days = ["a", "b", "c"]
    source = vd.table({"id": [*range(6)], "day": sorted(days * 2)}, partition_column="day")
    keys = dg.StaticPartitionsDefinition(days)
    docs = vd.Pipeline("docs", source=source, id="id", partitions_def=keys, fragment_rows=2)
    docs.map("answer", refused, columns={"n": "id"}, on_error="quarantine", concurrency=1)
    events = executed(docs, store, days, InProcess())
    errors = [each for each in events if isinstance(each, Failed)]
    assert [each.partition for each in errors] == failed
    assert {str(each.error).partition(")")[2].split("\n\n")[0] for each in errors} == {
        ": wrong key"
    }
    assert len((tmp_path / "asked").read_text().split()) == (1 if down else 5)
