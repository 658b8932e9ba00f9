"""What a server process derives from texts."""

from __future__ import annotations

from vane_dagster.servers.launch import flags
from vane_dagster.servers.process import _filled, gauge_sum

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {b} c"} 2.0
vllm:num_requests_running{engine="1",model_name="a"} 3.0 1700000000000
vllm:num_requests_waiting{engine="0",model_name="a"} 4.0
vllm:num_requests_running_total{engine="0"} 100.0
nv_inference_pending_request_count 1
broken{
"""


def test_gauges_are_summed_up_over_labels_and_names():
    names = ["vllm:num_requests_running", "vllm:num_requests_waiting"]
    assert gauge_sum(METRICS, names) == 9.0
    assert gauge_sum(METRICS, ["nv_inference_pending_request_count"]) == 1.0


def test_metrics_that_do_not_exist_are_unknown():
    assert gauge_sum(METRICS, ["vllm:num_requests"]) is None
    assert gauge_sum("", ["a"]) is None
    assert gauge_sum(METRICS, ["broken"]) is None


def test_flags_are_known_by_their_names():
    command = ("serve", "--api-key", "one", "--hf-token=two", "-q", "--model", "m")
    named = flags(command)
    assert {"api-key": "one"} in named
    assert {"hf-token": "two"} in named
    assert {"model": "m"} in named


def test_placeholders_are_replaced_literally():
    values = {"port": "8000", "host": "::1"}
    assert _filled('{"a": {port}, "{b}": "{host}:{port}"}', values) == (
        '{"a": 8000, "{b}": "::1:8000"}'
    )
