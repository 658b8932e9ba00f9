"""A run's events on their way from the executor's thread to a slower listener."""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Union

from vane_dagster.events import Committed, Event, Failed, Progress, Unchanged, Writing


class EventQueue:
    """A queue in which log lines and progress overtake results.

    Results (`Committed`, `Unchanged`, `Failed`) take long to write to Dagster's event log. Of
    `Progress`, only the latest is kept. Once all events are there, a `Writing` event in front of
    each result says how many were handed out.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._progress: Progress | None = None
        self._logged: deque[Event] = deque()
        self._results: deque[Event] = deque()
        self._handed_out = 0
        self._announced = 0
        self._is_complete = False

    def put(self, event: Union[Event, None]) -> None:
        """Adds an event; None says that no other will follow."""
        with self._changed:
            if event is None:
                self._is_complete = True
            elif isinstance(event, Progress):
                self._progress = event
            elif isinstance(event, (Committed, Unchanged, Failed)):
                self._results.append(event)
            else:
                self._logged.append(event)
            self._changed.notify()

    def get(self, timeout: float) -> Union[Event, None]:
        """The next event, or None after the last one.

        Raises:
            queue.Empty: If none came within the timeout, in seconds.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_next, timeout):
                raise queue.Empty
            if self._logged:
                return self._logged.popleft()
            if self._progress is not None:
                progress, self._progress = self._progress, None
                return progress
            if not self._results:
                return None
            if self._is_complete and self._announced < self._handed_out:
                self._announced = self._handed_out
                return Writing(self._handed_out, self._handed_out + len(self._results))
            self._handed_out += 1
            return self._results.popleft()

    def _has_next(self) -> bool:
        return bool(self._logged or self._progress or self._results or self._is_complete)
