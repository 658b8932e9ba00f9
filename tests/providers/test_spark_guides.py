"""Our side of the section of docs/coming-from/spark.md with Triton.

The changed lines of its functions are counted by `tests/examples/test_coming_from.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import vane_dagster as vd
from support.coming_from_data import write_data
from support.data import read_stage
from support.pytriton_programs import pytriton, pytriton_client  # noqa: F401  # fixtures
from support.results import Run
from support.snippets import loaded, pipelines, snippets


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def client(pytriton_client: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = filter(None, [os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(pytriton_client), *before]))


@pytest.mark.usefixtures("client")
def test_a_tensor_by_triton(
    pytriton: str, data: Path, local: vd.LocalCompute, materialize: Run
) -> None:
    replaced = {"/opt/triton/bin/python": pytriton}
    section = next(s for s in snippets("spark") if s.heading == "Triton on the executors")
    with loaded(section, data, replaced) as module:
        (pipeline,) = pipelines(module)
        assert materialize(pipeline, local).success

    # The weights add the first of the four features to the doubled last.
    rows = read_stage(data / "store", "images", "preds")
    assert rows.to_pydict() == {"id": [1, 2, 3], "preds": [6.0, 18.0, 30.0]}
