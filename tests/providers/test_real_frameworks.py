"""Tensors, threads and errors of the frameworks themselves, as workers see them.

Each framework runs in a process of its own: TensorFlow and Triton, which comes with vLLM, each hold
a copy of LLVM, and a process that imports both aborts.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest


def printed(framework: str, program: str) -> Any:
    """Return the JSON that a program prints, which imports a framework as a worker does."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    head = "import json\nfrom vane_dagster.worker import frameworks\nframeworks.set_threads(1)\n"
    command = [sys.executable, "-c", head + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_tensors_of_tensorflow_are_results():
    program = """
import pyarrow as pa, tensorflow as tf
from vane_dagster.worker.results import from_result, put_together

result = {
    "id": tf.constant([1, 2], tf.int64),
    "matrix": tf.constant([[1.0, 2.0], [3.0, 4.0]]),
    "bytes": tf.constant(["a", "b"]),
    "variable": tf.Variable([0.5, 1.5]),
    "ragged": tf.ragged.constant([[1], [2, 3]], dtype=tf.int64),
    "each": [tf.constant(1.0), tf.constant(2.0)],
}
schema = pa.schema({
    "id": pa.int64(), "matrix": pa.list_(pa.float32(), 2), "bytes": pa.binary(),
    "variable": pa.float32(), "ragged": pa.list_(pa.int64()), "each": pa.float32(),
})
rows = put_together([from_result(result, schema, (), "id", "here")], schema, "here")
print(json.dumps(rows.to_pylist(), default=bytes.decode))
"""
    assert printed("tensorflow", program) == [
        {"id": 1, "matrix": [1, 2], "bytes": "a", "variable": 0.5, "ragged": [1], "each": 1},
        {"id": 2, "matrix": [3, 4], "bytes": "b", "variable": 1.5, "ragged": [2, 3], "each": 2},
    ]


def test_tensorflow_out_of_memory():
    program = """
import tensorflow as tf

try:
    tf.zeros([10**7, 10**7])
except Exception as error:
    print(json.dumps([frameworks.is_out_of_memory(error), frameworks.is_dead(error)]))
"""
    assert printed("tensorflow", program) == [True, False]


def test_tensorflow_has_the_threads_of_its_worker():
    program = """
import psutil, tensorflow as tf

before = psutil.Process().num_threads()
rows = tf.random.uniform([500, 500])
for _ in range(20):
    rows = tf.matmul(rows, rows)
rows.numpy()
print(json.dumps([before, psutil.Process().num_threads()]))
"""
    one = printed("tensorflow", program)
    many = printed("tensorflow", "frameworks.set_threads(9)\n" + program)
    assert many[1] - one[1] >= 8, "two pools: for operations, and within them"


def test_onnxruntime_out_of_memory():
    program = """
import numpy as np, onnx, onnxruntime
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

graph = make_graph(
    [make_node("ConstantOfShape", ["shape"], ["zeros"])],
    "zeros",
    [make_tensor_value_info("shape", onnx.TensorProto.INT64, [2])],
    [make_tensor_value_info("zeros", onnx.TensorProto.FLOAT, None)],
)
model = make_model(graph, opset_imports=[make_opsetid("", 17)], ir_version=8)
session = onnxruntime.InferenceSession(model.SerializeToString())
try:
    session.run(None, {"shape": np.array([10**7, 10**7])})
except Exception as error:
    print(json.dumps([frameworks.is_out_of_memory(error), frameworks.is_dead(error)]))
"""
    assert printed("onnxruntime", program) == [True, False]
