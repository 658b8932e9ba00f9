"""What a worker wrote to the logs that Ray keeps of its process, by run and stage.

When a run or a stage begins to use a worker, the worker writes a line into both logs, of standard
output and of standard error. The text up to the next such line belongs to this run or stage. The
line may follow other text, because user code may write text without a line break.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"--- vane-dagster: run (\S+), stages (\S+), worker (\S+) ---\n?$")
_LINES = 1000


class LogSections:
    """Begins the sections of a worker's process."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._current: tuple[str, tuple[str, ...]] | None = None

    def begin(self, run_id: str, stages: tuple[str, ...]) -> None:
        """Begin a section, unless it is the current one. Workers without a model have none."""
        if self._current == (run_id, stages) or not stages:
            return
        self._current = run_id, stages
        used_by = f"run {run_id}, stages {','.join(stages)}, worker {self._worker}"
        text = f"--- vane-dagster: {used_by} ---\n"
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.write(descriptor, text.encode())  # past the tap of what the user's code prints


def own_logs() -> list[Path]:
    """Return the logs of this worker's process: of standard output, and of standard error."""
    return [Path(os.path.realpath(f"/proc/self/fd/{descriptor}")) for descriptor in (1, 2)]


def tail(lines: int) -> str:
    """Return the last lines of each log of this process."""
    last: list[str] = []
    for path in own_logs():
        with path.open(errors="replace") as log:
            last += (line.rstrip("\n") for line in deque(log, lines))
    return "\n".join(last)


class Section(NamedTuple):
    """Some lines that a worker wrote.

    Attributes:
        run: The run's id.
        worker: The worker's name.
        node: Host name of its machine.
        file: The path of the log there.
        lines: The lines.
    """

    run: str
    worker: str
    node: str
    file: str
    lines: Sequence[str]


def sections(folders: Iterable[Path], run_id: str, stage: str) -> Iterator[Section]:
    """Yield what workers of this node wrote for a stage of a run."""
    for file in (file for folder in folders for file in sorted(folder.glob("worker-*"))):
        with file.open(errors="replace") as log:
            for (run, worker), lines in groupby(_of(log, run_id, stage), itemgetter(0)):
                while some := [*islice(lines, _LINES)]:
                    text = [line for _, line in some if line is not None]
                    yield Section(run, worker, socket.gethostname(), str(file), text)


def _of(
    log: Iterable[str], run_id: str, stage: str
) -> Iterator[tuple[tuple[str, str], str | None]]:
    """Yield the lines of a log that belong to a stage of a run, with the run and the worker.

    None stands for the beginning of a section, which may have no line.
    """
    user, belongs = ("", ""), False
    for line in log:
        match = _LINE.search(line)
        own = line[: match.start()] if match else line
        if belongs and own:
            yield user, own.rstrip("\n")
        if match:
            run, stages, worker = match.groups()
            user, belongs = (run, worker), run.startswith(run_id) and stage in stages.split(",")
            if belongs:
                yield user, None
