"""Calls of a worker in a subprocess, and its replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Union

from vane_dagster.pipeline.options import WorkerLifecycle
from vane_dagster.servers.directory import Endpoints
from vane_dagster.worker.pools import ModelSpec
from vane_dagster.worker.protocol import Work
from vane_dagster.worker.reports import LoadReport, WorkerStatus, WorkReport


@dataclass(frozen=True)
class LoadCall:
    """A request to construct the model, unless it is loaded.

    Attributes:
        model: The model; None for a worker without one.
        archive: The user's modules, as a zip.
        threads: Threads that the worker computes with.
        env: Environment variables to set, or to unset if None.
        lifecycle: When the worker times out, or is replaced.
        endpoints: The endpoints of the servers that its code calls.
        versions: The driver's versions, if the worker may have others.
        run_id: The run.
        stages: The run's stages that call the model, such as "docs/embedding".
        lease: The lease under which the worker is used.
    """

    model: ModelSpec | None
    archive: bytes = b""
    threads: int = 0
    env: Mapping[str, str | None] = field(default_factory=dict)
    lifecycle: WorkerLifecycle = field(default_factory=WorkerLifecycle)
    endpoints: Endpoints = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    run_id: str = ""
    stages: tuple[str, ...] = ()
    lease: str = ""


@dataclass(frozen=True)
class RunCall:
    """A call of `Host.run`; `tables` are the paths of Arrow files."""

    work: Work
    tables: tuple[str, ...]


@dataclass(frozen=True)
class AnnounceCall:
    """The endpoints of servers that the worker's code calls. It is not answered."""

    endpoints: Endpoints


WorkerRequest = tuple[int, Union[LoadCall, RunCall, AnnounceCall, Literal["status", "stop"]]]
"""A ticket and a call of a worker.

"status" asks for a `WorkerStatus`, and is answered while the worker works. "stop" stops the server
that the worker runs, and the worker, and is not answered.
"""

WorkerReply = tuple[int, Union[WorkReport, LoadReport, WorkerStatus, range], Union[str, None]]
"""The ticket of a call, its answer, and the path of the Arrow file with its rows, if any.

A range is not the answer yet: it has the places of the rows that the call begins to compute.
"""
