"""Definitions that commands load, and their wrong usage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from click import ClickException
from click.testing import CliRunner

import vane_dagster as vd
from support.in_process import compute
from vane_dagster.cli import definitions, plan
from vane_dagster.cli.main import main
from vane_dagster.cli.quarantine import _retry
from vane_dagster.orchestration import assets
from vane_dagster.storage.quarantine import fault_schema, write_failed

DEFINITIONS = """
import dagster as dg
import vane_dagster as vd

one = vd.Pipeline("one", source=vd.table([{"id": 1}]), id="id")
one.project("same", ["id"])
two = vd.Pipeline("two", source=vd.csv("ids.csv"), id="id")
two.project("same", ["id"])
defs = dg.Definitions(assets=[one.build_assets(), two.build_assets()])
"""


@pytest.fixture(autouse=True)
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with definitions, in a file `defs_of_test.py`."""
    (tmp_path / "defs_of_test.py").write_text(DEFINITIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr(assets, "PIPELINES", pipelines := {})
    monkeypatch.setattr(definitions, "PIPELINES", pipelines)
    monkeypatch.setattr(plan, "PIPELINES", pipelines)
    monkeypatch.delitem(sys.modules, "defs_of_test", raising=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["plan", "-m", "defs_of_test", "--select", "same"],
            "name one of the pipelines of the definitions: one, two",
        ),
        (["plan", "two"], "give the definitions"),
        (["quarantine", "one/same", "--retry"], "give the definitions"),
        (["plan", "two", "-f", "none.py"], "there is no file 'none.py'"),
        (["preview", "one/none", "-m", "defs_of_test"], "'none' is not a stage of one: same"),
        (["preview", "three/same", "-m", "defs_of_test"], "name one of the pipelines"),
    ],
)
def test_wrong_usage(words: list[str], message: str) -> None:
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, message in done.output) == (2, True), done.output


def test_a_plan_without_a_name_has_all_pipelines(tmp_path: Path) -> None:
    words = ["plan", "-m", "defs_of_test", "--store", str(tmp_path / "store")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1, "two has no file"
    assert "pipeline one: what a run would compute" in done.output
    assert "pipeline two: what a run would compute" in done.output
    (tmp_path / "ids.csv").write_text("id\n1\n")
    done = CliRunner().invoke(main, [*words, "--json"])
    plans = json.loads(done.stdout)
    assert {name: plan["pipeline"] for name, plan in plans.items()} == {"one": "one", "two": "two"}


@pytest.mark.parametrize("path", ["two/source", "two"])
def test_a_forward_trace_begins_at_the_source(path: str) -> None:
    words = ["trace", path, "--forward", "--id", "1", "-f", "defs_of_test.py", "--store", "s"]
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, "has no pipeline 'two'" in done.output) == (1, True)


def test_a_plan_fails_if_a_partition_cannot_be_planned() -> None:
    words = ["-m", "defs_of_test", "--store", "store"]
    done = CliRunner().invoke(main, ["plan", "one", *words])
    assert (done.exit_code, "1 of 1 partition: 1 row" in done.stdout) == (0, True), done.output
    done = CliRunner().invoke(main, ["plan", "two", *words])
    assert (done.exit_code, "no CSV file at " in done.stdout) == (1, True), done.output
    assert "or, if its files have another format, use the source for that format" in done.stdout


@pytest.mark.parametrize(
    ("file", "above"), [("pyproject.toml", "tool.dg."), ("dg.toml", "")], ids=lambda given: given
)
def test_definitions_are_those_of_the_dg_project_around_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, above: str
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.dg.workspace]\n")
    project = f"[{above}project]\nroot_module = 'mine'\n"
    target = "code_location_target_module = 'defs_of_test'\n"
    (tmp_path / file).write_text(project + target)
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / "defs_of_test.py").rename(tmp_path / "src" / "defs_of_test.py")
    monkeypatch.chdir(tmp_path / "src" / "deep")
    done = CliRunner().invoke(main, ["plan", "--select", "same"])
    assert "name one of the pipelines of the definitions: one, two" in done.output


def test_definitions_that_cannot_be_loaded_have_the_first_cause(tmp_path: Path) -> None:
    (tmp_path / "defs_of_test.py").write_text(
        "try:\n    {}['LAKE']\nexcept KeyError as error:\n"
        "    raise RuntimeError('in the component docs') from error\n"
    )
    done = CliRunner().invoke(main, ["plan", "-f", "defs_of_test.py"])
    text = "cannot be loaded: RuntimeError: in the component docs\nKeyError: 'LAKE'\n"
    text += "at defs_of_test.py, line 2\n"
    assert (done.exit_code, text in done.output) == (1, True), done.output


def test_definitions_that_cannot_be_loaded_have_the_line_of_the_users_code(tmp_path: Path) -> None:
    (tmp_path / "defs_of_test.py").write_text("import helper_of_test\n")
    (tmp_path / "helper_of_test.py").write_text("import re\n\nre.compile('(')\n")
    done = CliRunner().invoke(main, ["plan", "-f", "defs_of_test.py"])
    assert done.output.endswith("at helper_of_test.py, line 3\n"), done.output
    (tmp_path / "helper_of_test.py").write_text("import not_there\n")
    done = CliRunner().invoke(main, ["plan", "-f", "defs_of_test.py"])
    text = "ModuleNotFoundError: No module named 'not_there'\nat helper_of_test.py, line 1\n"
    assert done.output.endswith(text), done.output


def test_rows_that_were_not_committed_are_not_retried(store) -> None:
    rows = pa.Table.from_pylist([{"id": 1, "run_id": "r"}], fault_schema(pa.int64()))
    write_failed(store, "one", "same", None, None, 1, [rows])
    words = ["--retry", "-f", "defs_of_test.py", "--store", store.root.path]
    done = CliRunner().invoke(main, ["quarantine", "one/same", *words])
    assert done.exit_code == 0, done.output
    assert "not committed: run r failed. Only its first" in done.output


def test_rows_are_retried_only_if_nothing_else_is_due(store, monkeypatch) -> None:
    def stages(more: int, function: Any = odd) -> vd.Pipeline:
        docs = vd.Pipeline("docs", source=vd.table([{"id": 1}, {"id": 2}]), id="id")
        first = docs.map("first", function, on_error="quarantine")
        first.project("second", {"more": f"first + {more}"})
        return docs

    compute(stages(1), store)
    given: Any = SimpleNamespace(options=["-f", "defs.py"], resource=lambda name: None)
    monkeypatch.setattr(vd.Pipeline, "run", lambda *args, **options: ran.append(options["select"]))
    ran: list[str] = []
    with pytest.raises(ClickException) as error:
        _retry(stages(2)["first"], None, store, given)
    assert error.value.message.startswith("docs/second: the stage is not up to date, so a retry")
    assert "second  1 of 1 partition" in error.value.message
    assert "adopt docs/second -f defs.py. Otherwise materialize docs/first+" in error.value.message
    assert not ran
    _retry(stages(1)["first"], None, store, given)
    assert ran == ["first+"]
    compute(stages(1, odd_too), store, stages=["first"])  # a stage below it was not run since
    with pytest.raises(ClickException, match="docs/second: the stage is not up to date"):
        _retry(stages(1, odd_too)["first"], None, store, given)


def odd(id: int) -> int:
    return 1 // (id % 2)


def odd_too(id: int) -> int:
    return 2 // (id % 2)


def test_ids_of_several_partitions_are_shown_with_them(store) -> None:
    for key in ("a", "b"):
        rows = pa.Table.from_pylist([{"id": 7, "run_id": "r"}], fault_schema(pa.int64()))
        write_failed(store, "one", "same", key, None, 1, [rows])
    done = CliRunner().invoke(main, ["quarantine", "one/same", "--store", store.root.path])
    (line,) = (each for each in done.output.splitlines() if each.startswith("  ids: "))
    shown = line.removeprefix("  ids: ").split(", ")
    assert {*shown} == {"7 (partition a)", "7 (partition b)"}
