"""Rows that failed are waived and patched on the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner

import vane_dagster as vd
from vane_dagster.cli.main import main


def test_rows_are_waived_and_patched_and_what_follows_is_computed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("repairs.py").write_text(REPAIRS)

    def run(*words: str, fails: int = 0) -> Any:
        monkeypatch.delitem(sys.modules, "repairs", raising=False)  # the command loads it again
        done = CliRunner().invoke(main, ["quarantine", "repairs/checked", *words])
        assert done.exit_code == fails, done.output
        return done

    Path("broken").touch()
    from repairs import repairs  # type: ignore[import-not-found]  # written above

    repairs.run(store="store")
    waive = ["--waive", "an empty page", "--store", "store"]

    done = run(*waive, "--ids", "3")

    assert done.stderr.splitlines()[0] == "waived 1 row of repairs/checked"
    assert done.stdout.splitlines()[:4] == [
        "1 row: ValueError: broken",
        "  ids: 3",
        "  waived: 3",
        "  partitions: b",
    ]
    assert "Retry them" not in done.output, "all are waived"
    assert "rows '5' are not quarantined" in run(*waive, "--ids", "3,5", fails=1).output
    assert "--ids goes with --waive or --undo" in run(*waive, fails=2).output
    assert "give one of" in run(*waive, "--ids", "3", "--retry", fails=2).output

    pq.write_table(pa.table({"id": [3], "y": [30]}), "fixes.parquet")
    patch = ["--patch", "fixes.parquet", "-f", "repairs.py"]
    assert "the stage is partitioned; name one, of 'a', 'b'" in run(*patch, fails=1).output
    assert "no input row with id 3" in run(*patch, "--partitions", "a", fails=1).output
    assert "rows of one partition; name one" in run(*patch, "--partitions=a..b", fails=2).output
    assert "cannot be read" in run("--patch", "x.parquet", *patch[2:], fails=2).output
    Path("calls").unlink()

    done = run(*patch, "--partitions", "b")

    assert done.stderr.splitlines()[0] == "patched 1 row of repairs/checked"
    assert done.stdout == "No row is quarantined.\n"
    assert not Path("calls").exists()
    assert vd.load("repairs/last", store="store")["y"].to_pylist() == [0, 1, 2, 30, 4, 5]

    done = run("--undo", "--ids", "3", "-f", "repairs.py")

    assert done.stderr.splitlines()[:2] == [
        "unwaived 1 row of repairs/checked", "unpatched 1 row of repairs/checked",
    ]  # fmt: skip
    assert done.stdout.splitlines()[0] == "1 row: ValueError: broken"
    assert "waived: 3" not in done.stdout
    assert "Retry them" in done.stdout
    assert vd.load("repairs/last", store="store")["y"].to_pylist() == [0, 1, 2, 4, 5]


REPAIRS = """
import os
import dagster as dg
import vane_dagster as vd

def check(batch):
    values = batch["x"].to_pylist()
    with open("call" + "s", "a") as file:  # a literal that names a file is part of the code
        file.write(" ".join(map(str, values)))
    if 3 in values and os.path.exists("brok" + "en"):
        raise ValueError("broken")
    return {"y": values}

rows = [{"id": n, "x": n, "part": "ab"[n // 3]} for n in range(6)]
repairs = vd.Pipeline(
    "repairs", source=vd.table(rows, partition_column="part"), id="id",
    partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
)
checked = repairs.map_batches(
    "checked", check, columns=["x"], schema={"y": "BIGINT"}, on_error="quarantine"
)
checked.project("last", ["id", "y"])
defs = dg.Definitions(
    assets=[repairs.build_assets()],
    resources={"compute": vd.LocalCompute(), "store": vd.FragmentStore(root="store")},
)
"""
