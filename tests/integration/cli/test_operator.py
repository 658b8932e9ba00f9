"""The commands of an operator with their definitions: plans, previews, traces, failed rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import vane_dagster as vd
from support.warm_workers import WarmLocal
from vane_dagster.cli import definitions
from vane_dagster.cli.main import main
from vane_dagster.orchestration import assets

DEFINITIONS = """
import os
import dagster as dg
import vane_dagster as vd

rows = [{"id": n, "text": "word " * 20} for n in (1, 2)]
one = vd.Pipeline("one", source=vd.table(rows), id="id")
one.project("same", {"id": "id", "text": "text", "list": "range(9)"})
two = vd.Pipeline("two", source=vd.csv("ids.csv"), id="id")
two.project("same", ["id"], where="id <> 2")


def check(batch):
    numbers = batch["n"].to_pylist()
    with open("call" + "s", "a") as file:  # a literal that names a file is part of the code
        file.write(" ".join(map(str, numbers)) + " ")
    for number in numbers if os.path.exists("brok" + "en") else ():
        if number % 3 == 0:
            raise ValueError(f"{number} is divisible by '3'")
        if number == 7:
            raise RuntimeError("seven")
    return {"y": batch["n"]}


rows = [{"id": n, "n": n, "part": "ab"[n % 2]} for n in range(1, 17)]
numbers = vd.Pipeline(
    "numbers", source=vd.table(rows, partition_column="part"), id="id",
    partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
)
checked = numbers.map_batches(
    "checked", check, columns=["n"], schema={"y": "BIGINT"}, on_error="quarantine"
)
checked.project("last", ["id", "y"])
assets = [each.build_assets() for each in (one, two, numbers)]
resources = {"compute": vd.LocalCompute(num_cpus=2), "store": vd.FragmentStore(root="its store")}
"""
PLAIN = "defs = dg.Definitions(assets=assets, resources=resources)"
CLUSTER = """
class Cluster(dg.ConfigurableResource):
    def setup_for_execution(self, context):
        raise RuntimeError("a cluster was started")

resources["compute"] = vd.RayCompute(cluster={})
"""
LAZY = f"@dg.definitions\ndef {PLAIN.replace(' =', '(): return')}"


@pytest.mark.filterwarnings("ignore:The `__fields__` attribute")  # of Dagster, for `Cluster`
def test_an_operator_plans_previews_traces_and_repairs(tmp_path, monkeypatch):
    (tmp_path / "defs_of_test.py").write_text(DEFINITIONS + PLAIN)
    (tmp_path / "ids.csv").write_text("id\n2\n1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr(assets, "PIPELINES", pipelines := {})
    monkeypatch.setattr(definitions, "PIPELINES", pipelines)
    monkeypatch.setattr(vd, "LocalCompute", WarmLocal)
    file, store = ("-f", "defs_of_test.py"), ("--store", "its store")

    def run(*words: str, fails: int = 0, progress: bool = False) -> str:
        monkeypatch.delitem(sys.modules, "defs_of_test", raising=False)  # it is loaded again
        done = CliRunner().invoke(main, words)
        assert done.exit_code == fails, done.output
        return done.output if fails or progress else done.stdout

    def last() -> list[int]:
        rows: list[int] = vd.load("numbers/last", store="its store")["y"].to_pylist()
        return rows

    # Plans, with the store of the definitions or another one.
    planned = json.loads(run("plan", "two", "-m", "defs_of_test", "--json"))
    assert planned["stages"][0]["due"] == {"null": {"not computed before": 1}}
    assert Path("its store").exists()  # rows in memory are kept there
    shown = run("plan", "one", *file, "--store", "other")
    assert "same  1 of 1 partition: 2 rows in 1 fragment" in shown

    # A plan starts no cluster.
    for cluster in ("None", "vd.LocalCluster(num_cpus=2)", "Cluster()"):
        text = DEFINITIONS + CLUSTER.format(cluster) + PLAIN
        Path("defs_of_test.py").write_text(text)
        assert "same  1 of 1 partition" in run("plan", "one", *file, "--store", "other")
    sampled = run("plan", "one", *file, "--store", "other", "--sample", "1", fails=1)
    assert "a cluster was started" in sampled
    Path("defs_of_test.py").write_text(DEFINITIONS + PLAIN)

    # Previews.
    *table, cost = run("preview", "one/same", *file, "--rows", "1").splitlines()
    assert table == [
        "id  text                                      list",
        "1   word word word word wo…rd word word word  [0, 1, 2, … 9 in all]",
        "",
    ]
    assert cost.startswith("same: 1 row in ")
    assert json.loads(run("preview", "two/same", *file, "--json")) == {"id": 1}
    some = run("preview", "one/same", *file, "--json", "--ids", "2, 1")
    assert [json.loads(line)["id"] for line in some.splitlines()] == [1, 2]
    none = run("preview", "two/same", *file, "--where", "id > 9", fails=1)
    assert "has no row for which where='id > 9' is true, among 2 rows" in none

    # A trace reads the source with the definitions, which the store alone cannot.
    pipelines["two"].run(store="its store", compute=WarmLocal(num_cpus=2))
    for words, row in (store, None), (file, 1):
        found = json.loads(run("trace", "two/same", "--id", "1", "--json", *words))
        assert found["steps"][0]["row"] == row
    Path("dg.toml").write_text(
        "[project]\nroot_module = 'mine'\ncode_location_target_module = 'defs_of_test'\n"
    )  # whose definitions have the store
    assert json.loads(run("trace", "two/same", "--id", "1", "--json"))["steps"][0]["row"] is None
    Path("dg.toml").unlink()
    words = ("two/source", "--forward", "--id", "1", "--json")
    assert json.loads(run("trace", *words, *file))["steps"][0]["row"] == 1

    # Failed rows are grouped by kind of error.
    Path("broken").touch()
    pipelines["numbers"].run(store="its store", compute=WarmLocal(num_cpus=2))
    assert run("quarantine", "numbers/checked", *store).splitlines() == [
        "5 rows: ValueError: 6 is divisible by '3'",
        "  ids: 6 (partition a), 12 (partition a), 3 (partition b) and 2 more",
        "  partitions: a, b",
        "1 row: RuntimeError: seven",
        "  ids: 7",
        "  partitions: b",
        "Retry them: vane-dagster quarantine numbers/checked --retry -f <your definitions>",
    ]
    some = run("quarantine", "numbers/checked", "--partitions", "a", "--json", *store)
    (group,) = json.loads(some)
    assert (group["rows"], group["ids"], group["partitions"]) == (2, [6, 12], ["a"])

    # A retry computes them alone, and what follows. Definitions may be loaded lazily.
    (tmp_path / "defs_of_test.py").write_text(DEFINITIONS + LAZY)
    retry = ("quarantine", "numbers/checked", "--retry", *file)
    assert [group["rows"] for group in json.loads(run(*retry, "--json"))] == [5, 1]
    Path("broken").unlink()
    Path("calls").unlink(missing_ok=True)
    edited = DEFINITIONS.replace('batch["n"]}', 'batch["n"], "z": 1}')
    assert edited != DEFINITIONS
    (tmp_path / "defs_of_test.py").write_text(edited + LAZY)
    refused = run(*retry, fails=1)
    assert "numbers/checked: the stage is not up to date, so a retry would compute more" in refused
    assert "checked  2 of 2 partitions: at most 16 rows in 2 fragments" in refused
    assert "because: code of check changed" in refused
    assert "adopt it first: vane-dagster adopt numbers/checked -f defs_of_test.py. " in refused
    assert "Otherwise materialize numbers/checked+\n" in refused
    assert not Path("calls").exists()
    (tmp_path / "defs_of_test.py").write_text(DEFINITIONS + LAZY)
    assert run(*retry) == "No row is quarantined.\n"
    assert sorted(map(int, Path("calls").read_text().split())) == [3, 6, 7, 9, 12, 15]
    assert sorted(last()) == [*range(1, 17)]
    assert run(*retry) == "No row is quarantined.\n"  # and none was
    assert run("quarantine", "numbers/checked", *store, "--json") == "[]\n"
