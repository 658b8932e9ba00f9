"""A stage that is declared again: a notebook's cell replaces it, a module is refused."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import vane_dagster as vd
from support.in_process import InProcessCompute

Execute = Callable[[str], None]


@pytest.fixture
def pipeline() -> vd.Pipeline:
    return vd.Pipeline("p", source=vd.parquet("/data"), id="id")


@pytest.fixture
def execute(pipeline, monkeypatch) -> Execute:
    """Execute code as a cell: what IPython has of the execution is a fake."""
    shell = SimpleNamespace(execution_count=0)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    names: dict[str, Any] = {"p": pipeline, "vd": vd, "copied": lambda text: text}

    def run(code: str) -> None:
        shell.execution_count += 1
        exec(code, names)

    return run


A = 'a = p.project("a", ["x"])'
B = 'b = a.project("b", ["x"])'


def stages(pipeline: vd.Pipeline) -> list[str]:
    return [stage.name for stage in pipeline]


def test_a_cell_that_is_executed_again_replaces_its_stage(pipeline, execute):
    execute(A)
    execute('a = p.project("a", {"x": "1"})')
    assert stages(pipeline) == ["a"]
    assert pipeline["a"].spec.columns[-1] == ("x", "1")


def test_the_stages_that_read_it_are_removed_until_their_cells_are_executed_again(
    pipeline, execute
):
    execute(A)
    execute(B)
    execute('c = p.project("c", ["x"])')
    with pytest.warns(UserWarning, match="replaced; 'b', which read it, were removed"):
        execute(A)
    assert stages(pipeline) == ["c", "a"]
    with pytest.raises(vd.errors.DefinitionError, match="reads 'b', which was removed"):
        execute('b.project("d", ["x"])')
    execute(B)
    assert stages(pipeline) == ["c", "a", "b"]


def test_a_stage_that_reads_what_it_replaces_is_refused(pipeline, execute):
    execute(A)
    execute(B)
    for code in ('a = b.project("a", ["x"])', 'a = a.project("a", ["x"])'):
        with pytest.raises(
            vd.errors.DefinitionError, match=r"reads '[ab]', which was removed because it, or"
        ):
            execute(code)
    assert stages(pipeline) == ["a", "b"]


def test_a_stage_that_is_refused_changes_nothing(pipeline, execute):
    execute(A)
    tokens = 'p.flat_map("a", copied, columns={"text": "x"}, id="tok", schema={"t": "VARCHAR"}'
    with pytest.raises(vd.errors.DefinitionError, match="checks"):
        execute(f"{tokens}, asset=vd.Asset(checks=[5]))")
    assert (pipeline["a"].spec.kind, pipeline["a"].id) == ("project", "id")


def test_two_declarations_of_a_name_in_one_execution_are_refused(pipeline, execute):
    execute(A)
    with pytest.raises(
        vd.errors.DefinitionError, match="the pipeline already has a stage with this name"
    ):
        execute(f"{B}; {B}")
    assert stages(pipeline) == ["a", "b"]


HALF = "def half(x):\n    return x / 2\n"
DECORATED = """
import vane_dagster as vd
@vd.cls
class Half:
    def half(self, x):
        return x / 2
"""


@pytest.mark.parametrize(
    ("cell", "warns"),
    [
        (HALF, False),  # the same cell again
        ("# a note\ndef half(x):\n    return x / 2\n", False),
        ("def half(x):\n    return x / 2.5\n", True),
        ("half = 2\n", False),
        (DECORATED, False),
        (DECORATED.replace("2", "3"), True),
    ],
)
@pytest.mark.parametrize("shown_by", ["plan", "preview"])
def test_code_that_a_later_cell_defines_again_is_reported(
    tmp_path, monkeypatch, capsys, shown_by: str, cell: str, warns: bool
):
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def execute(number: int, text: str) -> None:
        name = f"<cell {number}>"
        entry = (len(text), None, text.splitlines(True), name)
        monkeypatch.setitem(linecache.cache, name, entry)
        exec(compile(text, name, "exec", dont_inherit=True), vars(main))

    execute(1, DECORATED if "Half" in cell else HALF)
    rows = vd.Pipeline("rows", source=vd.table([{"id": 1, "x": 1}]), id="id")
    half: Any = vars(main)["Half"]().half if "Half" in cell else vars(main)["half"]
    stage = rows.map("halved", half, schema={"y": "DOUBLE"})
    execute(2, cell)

    if shown_by == "plan":
        text = "\n".join(rows.plan(store=str(tmp_path)).warnings)
    else:
        stage.preview(store=str(tmp_path), compute=InProcessCompute())
        text = capsys.readouterr().out
    assert ("alf was defined again after the stage was declared" in text) == warns
