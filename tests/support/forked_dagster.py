"""Dagster's processes, each forked from the one that starts it, before it has threads.

A process of ``dagster dev`` that starts imports Dagster for two seconds of CPU time; a run and a
step import Ray too. `DagsterDev` runs this as a program of a fork server.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, util
from types import SimpleNamespace

from dagster._daemon import controller
from dagster_shared import ipc

from support.forked import Forked, InnerForkServer
from support.instances import cheap_instances


def main() -> None:
    """Run ``python -m``, with cheap instances in all processes."""
    with cheap_instances():
        controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 2  # see `dagster_dev.SITE`
        context = multiprocessing.get_context("forkserver")
        # Replaced functions take fewer parameters than the types of the libraries say.
        multiprocessing.get_context = lambda method=None: context  # type: ignore  # fewer parameters
        # A run has the process that it is forked from fork the processes of its steps.
        server = forkserver._forkserver
        started = server.ensure_running
        server.ensure_running = lambda: server._forkserver_address or started()
        run()


def run() -> None:
    """Run ``python -m`` in a process forked by another one of these."""
    inner = InnerForkServer()

    def start(
        command: Sequence[str],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        creationflags: int = 0,
    ) -> Forked:
        program = "from support.forked_dagster import run; run()"
        arguments = ["-c", program, *command[command.index("-m") + 1 :]]
        return inner.start(arguments, env or os.environ, {fd: fd for fd in pass_fds}, cwd)

    def spawn(_: bytes, command: Sequence[str], descriptors: Sequence[int]) -> int:
        arguments = command[command.index("-c") :]
        return inner.start(arguments, os.environ, {fd: fd for fd in descriptors}).pid

    # As above: a process is forked instead of started.
    ipc.subprocess = SimpleNamespace(Popen=start)  # type: ignore  # fewer parameters
    util.spawnv_passfds = spawn  # type: ignore  # fewer parameters
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
