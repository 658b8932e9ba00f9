"""Runs without Dagster's events, with what they print, and errors as they are reported."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

import pytest

import vane_dagster as vd
from support.data import partitioned
from support.in_process import InProcessCompute
from vane_dagster.errors import DefinitionError, VaneError
from vane_dagster.events import Failed
from vane_dagster.orchestration.reporting import failure_message


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
    made = vd.Pipeline("one", source=vd.table([{"id": 1, "n": 13}]), id="id")
    made.map_batches("halved", Half, schema={"half": "DOUBLE"}, on_error="quarantine")
    given = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}
    for _ in range(2):  # the second run finds the partition up to date
        with pytest.raises(VaneError, match=r"blocking checks: 1 failed\n.*'halved': rows failed"):
            made.run(**given)
    assert vd.quarantine("one/halved", store=given["store"])["id"].to_pylist() == [1]


def test_a_run_that_is_interrupted_prints_what_it_did(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        numbers(12, Interrupting()).run(store=str(tmp_path), compute=InProcessCompute())
    printed = capsys.readouterr().out
    assert "stopped after" in printed
    assert "halved: partitions: " in printed
    assert "  checks: " in printed


def test_wrong_options_are_named(tmp_path):
    with pytest.raises(DefinitionError, match="run config: max_cost is -1: Input should be"):
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
    assert "***@bucket" in failure_message(Failed("m", "a", error))
