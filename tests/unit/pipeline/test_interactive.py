"""A stage that is declared again: a notebook's cell replaces it, a module is refused."""

from __future__ import annotations

from typing import Any

import pytest

import vane_dagster as vd


def run(code: str, file: str, names: dict[str, Any]) -> None:
    exec(compile(code, file, "exec"), names)


def test_a_cell_that_is_executed_again_replaces_its_stage():
    names = {"p": vd.Pipeline("p", source=vd.parquet("/data"), id="id")}
    run('a = p.project("a", ["x"]); b = a.project("b", ["x"])', "<ipython-input-1-af>", names)
    run('a = p.project("a", {"x": "1"})', "<ipython-input-2-be>", names)
    assert [stage.name for stage in names["p"]] == ["a", "b"]
    assert names["p"]["a"].spec.columns[-1] == ("x", "1")


@pytest.mark.parametrize("file", ["definitions.py", "<string>"])
def test_a_module_declares_a_stage_once(file):
    names = {"p": vd.Pipeline("p", source=vd.parquet("/data"), id="id")}
    run('p.project("a", ["x"])', "<ipython-input-1-af>", names)
    with pytest.raises(vd.DefinitionError, match="there is a stage of that name already"):
        run('p.project("a", ["x"])', file, names)
