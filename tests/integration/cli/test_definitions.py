"""Commands that import the user's definitions."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from vane_dagster.cli import definitions
from vane_dagster.cli.main import main
from vane_dagster.orchestration import assets

DEFINITIONS = """
import dagster as dg
import vane_dagster as vd

rows = [{{"id": n, "text": "word " * 20}} for n in (1, 2)]
one = vd.Pipeline("one", source=vd.table(rows), id="id")
one.project("same", {{"id": "id", "text": "text", "list": "range(9)"}})
two = vd.Pipeline("two", source=vd.csv("ids.csv"), id="id")
two.project("same", ["id"], where="id <> 2")
store = vd.FragmentStore(root={store!r})
assets = [one.build_assets(), two.build_assets()]
resources = {{"store": store, "compute": vd.LocalCompute()}}
"""
PLAIN = "defs = dg.Definitions(assets=assets, resources=resources)\n"
LAZY = (
    "@dg.definitions\ndef defs():\n    return dg.Definitions(assets=assets, resources=resources)\n"
)


@pytest.fixture(params=[PLAIN, LAZY], ids=["plain", "lazy"])
def run(request, tmp_path, monkeypatch) -> Any:
    """Runs a command in a folder with definitions, in a file `defs_of_test.py`."""
    text = DEFINITIONS.format(store=str(tmp_path / "its store"))
    (tmp_path / "defs_of_test.py").write_text(text + request.param)
    (tmp_path / "ids.csv").write_text("id\n2\n1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr(assets, "PIPELINES", pipelines := {})
    monkeypatch.setattr(definitions, "PIPELINES", pipelines)
    monkeypatch.delitem(sys.modules, "defs_of_test", raising=False)
    return lambda *words: CliRunner().invoke(main, words)


def test_plan_finds_pipelines_and_store_in_definitions(run, tmp_path):
    done = run("plan", "two", "-m", "defs_of_test", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["stages"][0]["causes"] == {"not computed before": 1}
    assert (tmp_path / "its store").exists()  # rows in memory are kept there
    shown = run("plan", "one", "-f", "defs_of_test.py", "--store", str(tmp_path / "other"))
    assert "same  1 of 1 partition: 2 rows in 1 fragment" in shown.output


def test_preview_shows_the_first_rows(run):
    done = run("preview", "one/same", "-f", "defs_of_test.py", "--rows", "1")
    *table, empty, cost = done.output.splitlines()
    assert [*table, empty] == [
        "id  text                                      list",
        "1   word word word word word word word wo...  [0, 1, 2, ... 9 values]",
        "",
    ]
    assert cost.startswith("same: 1 row in ")
    rows = run("preview", "two/same", "-f", "defs_of_test.py", "--json").output
    assert json.loads(rows) == {"id": 1}
    some = run("preview", "one/same", "-f", "defs_of_test.py", "--json", "--ids", "2, 1")
    assert [json.loads(line)["id"] for line in some.output.splitlines()] == [1, 2]
    none = run("preview", "two/same", "-f", "defs_of_test.py", "--where", "id > 9")
    assert "has no row for which where='id > 9' is true, among 2 rows" in none.output


def test_trace_reads_a_source_that_the_store_alone_cannot(run):
    found = [run("plan", "two", "-f", "defs_of_test.py")]
    definitions.PIPELINES["two"].run(store="its store")
    for words, row in (["--store", "its store"], None), (["-f", "defs_of_test.py"], 1):
        found.append(run("trace", "two/same", "--id", "1", "--json", *words))
        assert json.loads(found[-1].output)["steps"][0]["row"] == row, found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "-m", "defs_of_test"], "name one of the pipelines of the definitions: one, two"),
        (["plan", "two"], "give the definitions"),
        (["plan", "two", "-f", "none.py"], "there is no file 'none.py'"),
        (["preview", "one/none", "-m", "defs_of_test"], "'none' is no stage of one: same"),
        (["preview", "three/same", "-m", "defs_of_test"], "name one of the pipelines"),
    ],
)
def test_wrong_usage(run, words, message):
    done = run(*words)
    assert (done.exit_code, message in done.output) == (2, True), done.output
