"""The compute resources' own manners."""

from __future__ import annotations

import pytest

import vane_dagster as vd


def test_a_process_that_is_connected_elsewhere_is_told_so(cluster):
    cluster.connect()

    with pytest.raises(vd.ComputeError, match=r"is connected to the Ray cluster at 127\.0\.0\.1:"):
        vd.RayCompute(address="127.0.0.1:1").backend(print)


def test_an_explicit_address_of_the_connected_cluster_is_that_cluster(cluster):
    import ray

    cluster.connect()
    address = ray.get_runtime_context().gcs_address

    assert vd.RayCompute(address=address).backend(print).capacity().total("accelerator") == 1
