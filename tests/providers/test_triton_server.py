"""Triton as a server of a pipeline: by a function for PyTriton, and by a model repository."""

from __future__ import annotations

import inspect
import os
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.paths import FENCED
from support.pool_models import until
from support.pytriton_programs import pytriton, pytriton_client, tritonserver  # noqa: F401  # fixtures
from support.results import Run
from support.snippets import imported

ROWS = 40
MODEL = """
import triton_python_backend_utils as triton


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = triton.get_input_tensor_by_name(request, "x").as_numpy()
        return triton.InferenceResponse([triton.Tensor("y", x * 2)])
"""
CONFIG = """
backend: "python"
max_batch_size: 64
input [{ name: "x" data_type: TYPE_FP64 dims: [ 1 ] }]
output [{ name: "y" data_type: TYPE_FP64 dims: [ 1 ] }]
"""


def doubling(ports, model_path):
    """Serve a model that multiplies by the number in a file, and gives the server's process id."""
    import os
    import pathlib
    import signal

    import numpy as np
    from pytriton.decorators import batch
    from pytriton.model_config import ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    factor = float(pathlib.Path(model_path).read_text())

    @batch
    def infer(x):
        return {"y": x * factor, "pid": np.full_like(x, os.getpid())}

    config = TritonConfig(http_port=ports[0], grpc_port=ports[1], metrics_port=ports[2])
    with Triton(config=config) as triton:
        number = {"dtype": np.float64, "shape": (1,)}
        triton.bind(
            model_name="doubler",
            infer_func=infer,
            inputs=[Tensor(name="x", **number)],
            outputs=[Tensor(name="y", **number), Tensor(name="pid", **number)],
            config=ModelConfig(max_batch_size=64),
        )
        signal.signal(signal.SIGTERM, lambda signum, frame: triton.stop())
        print("serving the model")
        triton.serve()


def asks(batch: Any, triton: Any) -> Any:
    """Ask a server by its HTTP protocol, which needs no packages, and never twice."""
    import json
    import urllib.request

    x = batch["x"].to_pylist()
    body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [len(x), 1], "data": x}]}
    request = urllib.request.Request(
        f"{triton.url}/v2/models/doubler/infer", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        outputs = {each["name"]: each["data"] for each in json.load(answer)["outputs"]}
    pids = [int(pid) for pid in outputs["pid"]]
    return {"y": outputs["y"], "pid": pids, "port": [triton.url.rpartition(":")[2]] * len(x)}


@pytest.fixture
def numbers(tmp_path: Path) -> vd.Pipeline:
    ids = pa.array(range(ROWS), pa.int64())
    write_source(tmp_path / "src", {"id": ids, "x": pa.array(map(float, range(ROWS)))})
    return vd.Pipeline("numbers", source=vd.parquet(str(tmp_path / "src")), id="id")


def answered(tmp_path: Path, stage: str) -> tuple[set[int], set[int]]:
    """Check the answers of a stage, and return the process ids and ports of its servers."""
    rows = read_stage(tmp_path / "store", "numbers", stage).sort_by("id")
    assert rows["y"].to_pylist() == [2.0 * x for x in range(ROWS)]
    return {*rows["pid"].to_pylist()}, {*map(int, rows["port"].to_pylist())}


@pytest.fixture
def function(pytriton: str, tmp_path: Path) -> vd.TritonServer:
    (tmp_path / "factor").write_text("2")
    return vd.TritonServer(
        doubling, model_path=vd.local_file(tmp_path / "factor"), model="doubler", python=pytriton
    )


def test_a_killed_function_is_restarted_and_leaves_no_files(
    numbers: vd.Pipeline,
    function: vd.TritonServer,
    tmp_path: Path,
    local: vd.LocalCompute,
    materialize: Run,
) -> None:
    """Each process of the server is killed once, while requests are in flight."""

    def asks_a_victim(batch: Any, triton: Any) -> Any:
        import os

        import psutil

        found = asks(batch, triton)
        place = batch["id"][0].as_py() // 8
        if place in (1, 3) and not (marks / str(place)).exists():
            runner = psutil.Process(found["pid"][0])
            (marks / str(place)).write_text(os.path.dirname(runner.cmdline()[3]))
            victims = [runner, *(p for p in runner.children() if p.name() == "tritonserver")]
            victims[place % 3 % 2].kill()
            asks(batch, triton)  # fails while the server is down
        return found

    marks = tmp_path / "marks"
    marks.mkdir()
    schema = {"y": "DOUBLE", "pid": "BIGINT", "port": "VARCHAR"}
    numbers.map_batches(
        "first", asks_a_victim, schema=schema, batch_size=8, batch_format="pyarrow",
        fn_kwargs={"triton": function}, concurrency=1,
    )  # fmt: skip

    assert materialize(numbers, local).success

    pids, ports = answered(tmp_path, "first")
    folders = {mark.name: mark.read_text() for mark in marks.iterdir()}
    assert sorted(folders) == ["1", "3"]
    assert len(pids) == 3, "a start, and a restart after each kill"
    assert len(ports) == 1
    until(lambda: not any(map(psutil.pid_exists, pids)), "the processes have ended")
    until(lambda: not any(map(os.path.exists, folders.values())), "the files are removed")


def example(documented: type) -> str:
    ((_, _, code),) = FENCED.findall(inspect.getdoc(documented) or "")
    return textwrap.dedent(code)


def test_the_function_of_the_docstring_runs(
    numbers: vd.Pipeline,
    pytriton: str,
    pytriton_client: Path,
    tmp_path: Path,
    local: vd.LocalCompute,
    materialize: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(pytriton_client))
    monkeypatch.chdir(tmp_path)
    replaced = {"/opt/triton/bin/python": pytriton, "numbers/*.parquet": "src/*.parquet"}
    with imported(example(vd.TritonServer), "function", tmp_path, replaced) as module:
        assert materialize(module.pipeline, local).success

    rows = read_stage(tmp_path / "store", "numbers", "doubled").sort_by("id")
    assert rows["doubled"].to_pylist() == [2.0 * x for x in range(ROWS)]


def test_the_repository_of_the_docstring_runs(
    numbers: vd.Pipeline,
    tritonserver: str,
    tmp_path: Path,
    local: vd.LocalCompute,
    materialize: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = tmp_path / "models" / "doubler" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    monkeypatch.setenv("PATH", os.path.dirname(tritonserver) + os.pathsep + os.environ["PATH"])
    monkeypatch.chdir(tmp_path)
    replaced = {
        '"/models"': '"models"', "    gpus=1,\n": "", "numbers/*.parquet": "src/*.parquet"
    }  # fmt: skip
    with imported(example(vd.Server), "repository", tmp_path, replaced) as module:
        assert materialize(module.pipeline, local).success

    rows = read_stage(tmp_path / "store", "numbers", "doubled").sort_by("id")
    assert rows["y"].to_pylist() == [2.0 * x for x in range(ROWS)]
