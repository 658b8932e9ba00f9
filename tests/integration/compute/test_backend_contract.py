"""The contract of backends, over subprocesses, Ray and the fake in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

# F403: all tests of the contract run here, over each backend.
from support.backend_contract import *  # noqa: F403  # the contract's tests
from support.in_process import InProcess
from vane_dagster.compute.local_backend import LocalBackend
from vane_dagster.compute.ray_backend import RayBackend


@pytest.fixture(params=["subprocesses", "in process", "ray"])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each backend in turn, with two CPUs."""
    made: Any
    if request.param == "ray":
        request.getfixturevalue("cluster").connect()
        made = RayBackend()
    else:
        made = InProcess() if request.param == "in process" else LocalBackend(num_cpus=2)
    yield made
    made.close()
