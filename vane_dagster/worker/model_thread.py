"""The thread of a model: where it is constructed, and where its synchronous code runs."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from vane_dagster.worker.isolation import one_process

P = ParamSpec("P")
T = TypeVar("T")


class ModelThread:
    """Runs functions one at a time in one thread, for state that libraries keep by thread.

    Examples are the gradient mode of torch, and connections of sqlite3. A worker with one slot has
    one thread for everything, which is used as it is.
    """

    def __init__(self, slots: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if slots > 1:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the thread, and return its result."""
        if self._thread is None or threading.current_thread() is self._thread:
            return function(*args, **kwargs)
        future: Future[T] = Future()
        self._calls.put((future, functools.partial(function, *args, **kwargs)))
        return future.result()

    def _serve(self) -> None:
        while True:
            future, call = self._calls.get()
            try:
                with one_process():
                    result = call()
                future.set_result(result)
                del result
            except BaseException as error:  # of user code; `run` raises it again
                future.set_exception(error)
            del future, call  # a table is not kept until the next call
