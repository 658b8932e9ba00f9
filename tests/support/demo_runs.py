"""Runs of the demo, forked from the command that starts them, which has imported what they need.

Imported by the command, in its own process.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import definitions.demo
from definitions import run

_PROGRAM = [sys.executable, "-m", "definitions.run"]


def fork_runs() -> None:
    """From now on, the demo forks its runs: each would import Dagster and Ray for five seconds."""
    forking = SimpleNamespace(Popen=_ForkedRun, PIPE=subprocess.PIPE)
    definitions.demo.subprocess = forking  # type: ignore[attr-defined]


class _ForkedRun:
    """The part of `subprocess.Popen` that the demo uses."""

    returncode: int | None = None

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        stdout: int,
        stderr: TextIO,
        text: bool,
    ) -> None:
        assert list(command[:3]) == _PROGRAM
        assert stdout == subprocess.PIPE
        assert text
        readable, writable = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.dup2(writable, 1)
            os.dup2(stderr.fileno(), 2)
            os.close(readable)
            os.close(writable)
            os.environ.clear()
            os.environ.update(env)
            os.chdir(cwd)
            _run(command[3:])
        os.close(writable)
        self.stdout = os.fdopen(readable, encoding="utf-8")

    def __enter__(self) -> _ForkedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _run(partitions: Sequence[str]) -> None:
    """Run some partitions and end the process."""
    status = 1
    try:
        status = run.main(partitions)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
