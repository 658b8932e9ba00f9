"""Output that user code prints in a worker, kept for the run's log and still passed on."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any, TextIO

from vane_dagster._user_errors import clean

_MAX_CHARACTERS = 64_000


class OutputTap:
    """A stream that passes text on, and keeps the end of it until it is drained."""

    _instance: OutputTap | None = None

    def __init__(self, through: TextIO) -> None:
        self._through = through
        self._kept = ""
        self._lock = threading.Lock()

    @classmethod
    def installed(cls) -> OutputTap:
        """Return the process's tap on its standard output, installed on the first call."""
        if cls._instance is None:
            cls._instance = cls(sys.stdout)
            sys.stdout = cls._instance
        return cls._instance

    def write(self, text: str) -> int:
        """Pass text on, and keep it."""
        with self._lock:
            self._kept = (self._kept + text)[-_MAX_CHARACTERS:]
        with contextlib.suppress(ValueError):  # user code may have closed it
            self._through.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the underlying stream."""
        with contextlib.suppress(ValueError):
            self._through.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._through, name)

    def drain(self) -> str:
        """Return the text written since the last call."""
        with self._lock:
            kept, self._kept = self._kept, ""
        return clean(kept)
