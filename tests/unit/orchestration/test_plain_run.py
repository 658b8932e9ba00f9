"""Runs without Dagster's events, with what they print, and errors as they are reported."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest

import vane_dagster as vd
from support.data import partitioned, write_source
from support.in_process import InProcessCompute, compute
from support.reused import upper
from vane_dagster.engine.row_lookups import RowLookups
from vane_dagster.errors import DefinitionError, VaneError
from vane_dagster.events import Failed, WorkerReady
from vane_dagster.orchestration.progress import failure_message
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store


class Half:
    def __call__(self, batch: Any) -> Any:
        if max(batch["n"].to_pylist()) > 12:
            raise ValueError("thirteen")
        return {"half": [n / 2 for n in batch["n"].to_pylist()]}


@dataclass(frozen=True)
class Few(vd.checks.Check):
    severity: Any = "WARN"
    most: int = 5

    def evaluate(self, context: vd.checks.CheckContext) -> vd.checks.CheckOutcome:
        return vd.checks.CheckOutcome(
            context.counts.rows <= self.most, f"{context.counts.rows} rows"
        )


@dataclass(frozen=True)
class Interrupting(vd.checks.Check):
    """Interrupts the run while partition b is committed."""

    def evaluate(self, context: vd.checks.CheckContext) -> vd.checks.CheckOutcome:
        if context.partition == "b":
            signal.raise_signal(signal.SIGINT)
        return vd.checks.CheckOutcome(True, "")


def numbers(last: int = 12, *checks: vd.checks.Check) -> vd.Pipeline:
    rows = [{"id": n, "n": n, "part": "ab"[n % 2]} for n in range(1, last + 1)]
    made = partitioned(vd.table(rows, partition_column="part"), ["a", "b"], "numbers")
    asset = vd.Asset(checks=checks)
    halved = made.map_batches("halved", Half, schema={"half": "DOUBLE"}, asset=asset)
    halved.project("last", ["id", "half"])
    return made


def test_the_pool_of_a_lambda_has_the_name_of_its_stage(tmp_path):
    made = vd.Pipeline("one", source=vd.table({"id": [1], "n": [2]}), id="id")
    made.map("twice", lambda n: 2 * n, schema={"twice": "BIGINT"})
    made.map_batches("half", Half, schema={"half": "DOUBLE"})
    events = compute(made, Store(StoragePath(str(tmp_path))))
    names = {event.model for event in events if isinstance(event, WorkerReady)}
    assert names == {"one/twice", "Half"}


def test_a_run_prints_what_it_did(tmp_path, capsys):
    given = {"store": vd.FragmentStore(root=str(tmp_path / "store")), "compute": InProcessCompute()}
    numbers().run(**given)
    printed = capsys.readouterr().out
    assert "halved: partitions: 2 committed; 12 rows in" in printed
    assert "model Half: 1 started in" in printed
    assert vd.load("numbers/last", store=given["store"]).num_rows == 12

    numbers().run("a", select="last", **given)
    assert "last: partitions: 1 up to date (6 rows in 1 fragment)" in capsys.readouterr().out
    numbers().run("a", select="last", force=True, **given)
    assert "last: partitions: 1 committed" in capsys.readouterr().out


def test_checks_are_summed_up_with_those_that_did_not_pass(tmp_path, capsys):
    given = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}
    numbers().run(**given)
    assert capsys.readouterr().out.endswith("  checks: 6 passed\n")
    for _ in range(2):  # evaluated again if the partition is up to date
        numbers(12, Few()).run(select="halved", **given)
        assert capsys.readouterr().out.endswith(
            "  checks: 4 passed, 2 warned\n"
            "    2 partitions (a, b), the first: stage 'halved', partition 'a': few warned: "
            "6 rows\n"
        )


def test_a_failed_blocking_check_is_an_error(tmp_path, capsys):
    made = vd.Pipeline("one", source=vd.table([{"id": 1, "n": 12}, {"id": 2, "n": 13}]), id="id")
    given = {"schema": {"half": "DOUBLE"}, "on_error": "quarantine"}
    made.map_batches("halved", Half, asset=vd.Asset(checks=[Few(blocking=True, most=0)]), **given)
    given = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}
    for _ in range(2):  # the second run finds the partition up to date
        with pytest.raises(VaneError, match=r"blocking checks: 1 failed\n.*'halved': few failed"):
            made.run(**given)
    assert vd.quarantine("one/halved", store=given["store"])["id"].to_pylist() == [2]


def test_stages_downstream_of_a_check_that_was_added_and_fails_are_withheld(tmp_path, capsys):
    given = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}
    made = numbers()
    made["last"].project("after", ["half"])
    made.run(**given)
    made = numbers(12, Few(blocking=True))
    made["last"].project("after", ["half"])
    capsys.readouterr()
    with pytest.raises(VaneError) as raised:
        made.run(**given)
    assert "'few' of the upstream stage 'halved' failed: 6 rows" in str(raised.value)
    assert "its former version stays in force" in str(raised.value)
    printed = capsys.readouterr().out
    assert "halved: partitions: 2 up to date" in printed
    assert "last: partitions: 2 failed" in printed
    assert "after: partitions: 2 failed" in printed


def test_a_run_that_is_interrupted_prints_what_it_did(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        numbers(12, Interrupting()).run(store=str(tmp_path), compute=InProcessCompute())
    printed = capsys.readouterr().out
    assert "stopped after" in printed
    assert "halved: partitions: " in printed
    assert "  checks: " in printed


def test_a_pipeline_of_the_same_name_and_another_source_is_warned_of(tmp_path, capsys):
    given = {"store": str(tmp_path / "store")}
    made = {}
    for team in ("a", "b"):
        write_source(tmp_path / team, {"id": [1], "n": [len(team)]})
        made[team] = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / team)), id="id")
        made[team].project("some", ["n"])
    made["a"].run(**given, compute=InProcessCompute())
    assert not made["a"].plan(**given).warnings
    for _ in range(2):  # a plan keeps nothing
        (text,) = made["b"].plan(**given).warnings
        assert text.startswith("pipeline 'docs': its results in this store are of another source")
        assert f"{tmp_path}/a). If that is another pipeline, rename one of the two" in text
    capsys.readouterr()
    made["b"].run(**given, compute=InProcessCompute())
    assert "results in this store are of another source" in capsys.readouterr().out
    assert not made["b"].plan(**given).warnings

    made["b"] = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/b/*.parquet"), id="id")
    made["b"].project("some", ["n"])
    found = made["b"].plan(**given)
    assert found.is_up_to_date
    assert found.warnings
    made["b"].run(**given, compute=InProcessCompute())
    assert not made["b"].plan(**given).warnings, "a run that computed nothing keeps it, too"


def test_wrong_options_are_named(tmp_path):
    for select in (numbers()["last"], ["last", 1]):
        with pytest.raises(DefinitionError, match=r"select is .*; expected a list of names"):
            numbers().run(store=str(tmp_path), select=select)
    with pytest.raises(DefinitionError, match="has no stages"):
        vd.Pipeline("none", source=vd.table([{"id": 1}]), id="id").run(store=str(tmp_path))
    with pytest.raises(ValueError, match=r"max_cost\n  Input should be"):
        numbers().run(store=str(tmp_path), max_cost=-1)


def test_a_partition_that_fails_is_an_error_and_the_others_are_committed(tmp_path, capsys):
    given = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}
    with pytest.raises(VaneError, match=r"^stage 'numbers/halved', partition 'b'.*thirteen"):
        numbers(13).run(**given)
    assert "halved: partitions: 1 committed, 1 failed" in capsys.readouterr().out
    assert vd.load("numbers/halved", "a", store=given["store"]).num_rows == 6
    with pytest.raises(DefinitionError, match="there is no partition 'c'"):
        numbers().run("c", **given)
    both = r"^2 partitions \(a, b\), the first: stage 'numbers/halved', partition 'a'.*thirteen"
    with pytest.raises(VaneError, match=both) as raised:
        numbers(14).run(**given)
    assert str(raised.value).count("thirteen\n") == 1


def test_a_target_that_cannot_be_listed_is_an_error_of_its_stage(tmp_path):
    made = numbers()
    made["last"].write("out", f"{tmp_path}/target/{{partition_key}}")
    (tmp_path / "target").touch()
    with pytest.raises(VaneError, match=r"^2 partitions \(a, b\), the first: stage 'numbers/out'"):
        made.run(store=str(tmp_path / "store"), compute=InProcessCompute())


def test_the_error_of_a_partition_is_masked_wherever_it_is_reported():
    """That of the driver too, as of its store."""
    error = VaneError("stage 'docs/m': s3://key:hidden-secret@bucket/part is gone")
    assert "***@bucket" in failure_message(Failed("m", "a", error), "docs")


def test_an_error_without_a_place_has_that_of_its_stage():
    failed = Failed("m", "a", VaneError("Model could not be constructed"))
    text = "stage 'docs/m', partition 'a': Model could not be constructed"
    assert failure_message(failed, "docs") == text


def is_odd(code: int) -> bool:
    return code % 2 > 0


def test_a_column_of_the_source_may_be_called_error(tmp_path):
    rows = [{"id": n, "code": n, "error": None if n % 3 else "timeout"} for n in range(60)]
    logs = vd.Pipeline("logs", source=vd.table(rows), id="id", fragment_rows=10)
    logs.filter("kept", is_odd)
    logs.run(store=str(tmp_path), compute=InProcessCompute())
    kept = vd.load("logs/kept", store=str(tmp_path)).to_pylist()
    assert kept == [row for row in rows if is_odd(row["code"])]


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return tmp_path / "notes"


def moved(places: str) -> vd.Pipeline:
    """A row for each place, in the partition that it names."""
    rows = [{"id": n, "n": str(n), "part": place} for n, place in enumerate(places)]
    made = partitioned(vd.table(rows, partition_column="part", allow_empty=True), [*"abc"], "moved")
    made.map("upper", upper, columns={"text": "n"}, reuse=vd.Reuse("rows"))
    return made


@pytest.mark.parametrize("after", ["abbb", "bbbb"])
def test_rows_that_move_are_not_computed_again(tmp_path, after, monkeypatch, notes):
    """Also if their own partition is empty then, and committed before they are looked up."""
    given = {"store": str(tmp_path), "compute": InProcessCompute()}
    moved("aaab").run(**given)
    notes.unlink()
    resolve = RowLookups._resolve

    def resolved(self: RowLookups, partition: int, stage: str) -> Any:
        time.sleep(0.7)  # while the empty partition is committed
        return resolve(self, partition, stage)

    monkeypatch.setattr(RowLookups, "_resolve", resolved)
    moved(after).run(**given)
    assert not notes.exists()


def test_a_plan_counts_no_row_as_exact_that_the_run_copies_over_partitions(tmp_path, notes):
    given = {"store": str(tmp_path), "compute": InProcessCompute()}
    rows = [{"id": f"{part}{n}", "n": str(n), "part": part} for part in "abc" for n in range(5)]
    source = vd.table(rows, partition_column="part")

    def edited(factor: int) -> vd.Pipeline:
        made = partitioned(source, [*"abc"], "equal")
        reuse = vd.Reuse(version=str(factor))
        made.map("out", upper, columns={"text": "n"}, reuse=reuse)
        return made

    edited(1).run(**given)
    edited(2).run("a", **given)
    (stage,) = edited(2).plan(rows=True, store=given["store"]).stages
    assert stage.rows_are == "at_most"
    notes.unlink()
    edited(2).run(**given)
    assert not notes.exists()
