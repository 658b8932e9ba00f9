"""What user code prints or logs in a worker, kept for the run's log and still passed on."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from vane_dagster._user_errors import clean
from vane_dagster.worker.reports import Output

_MAX_CHARACTERS = 64_000
_CUT = "(the beginning is cut; `vane-dagster logs` has it)\n"
_OVERWRITTEN = re.compile(r"^[^\n]*\r(?=[^\r\n])", re.MULTILINE)
"""Text that a terminal would not show any more, such as former states of a progress bar."""


class OutputTap:
    """The end of what was written to the process's standard output and error, until drained."""

    _instance: OutputTap | None = None

    def __init__(self) -> None:
        self._kept, self._has_problem = "", False
        self._lock = threading.Lock()

    @classmethod
    def installed(cls) -> OutputTap:
        """Return the tap of the process, installed on the first call."""
        if cls._instance is None:
            cls._instance = tap = cls()
            sys.stdout, sys.stderr = _Tapped(sys.stdout, tap), _Tapped(sys.stderr, tap)
            # A handler of the root logger would make the user's `basicConfig` do nothing.
            logging.setLogRecordFactory(tap._noting_problems(logging.getLogRecordFactory()))
        return cls._instance

    def keep(self, text: str) -> None:
        """Keep a text."""
        with self._lock:
            kept = self._kept + text
            self._kept = kept if len(kept) <= _MAX_CHARACTERS else _CUT + kept[-_MAX_CHARACTERS:]

    def drain(self) -> Output:
        """Return what was written since the last call."""
        with self._lock:
            kept, self._kept = self._kept, ""
            has_problem, self._has_problem = self._has_problem, False
        text = clean(_OVERWRITTEN.sub("", kept))
        return Output(text, has_problem) if text.strip() else Output()

    def _noting_problems(self, make: Callable[..., logging.LogRecord]) -> Any:
        def noted(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = make(*args, **kwargs)
            self._has_problem |= (record.levelno or 0) >= logging.WARNING  # None in copies
            return record

        return noted


class _Tapped:
    """A stream that passes text on, and gives it to a tap."""

    def __init__(self, through: TextIO | None, tap: OutputTap) -> None:
        # A process that is started with closed streams has None in place of them.
        self._through = through or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 for as long as the process lives
        self._tap = tap

    def write(self, text: str) -> int:
        self._tap.keep(text)
        with contextlib.suppress(ValueError, OSError):  # closed by user code, or by the other end
            self._through.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            self._through.flush()

    def __enter__(self) -> _Tapped:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._through, name)
