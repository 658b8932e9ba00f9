"""The model of a worker: its construction, and the order in which calls get to it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vane_dagster import _failpoints
from vane_dagster._secrets import keep_arguments
from vane_dagster.pipeline.lazy_instances import construct
from vane_dagster.worker import user_code
from vane_dagster.worker.isolation import one_process
from vane_dagster.worker.model_thread import ModelThread
from vane_dagster.worker.pools import ModelSpec
from vane_dagster.worker.udf_caller import UdfCaller


class LoadedModel:
    """The constructed model of a worker, or its function.

    Attributes:
        instance: The constructed model; None before.
        content: What it was constructed from; see `ModelSpec.content`.
    """

    def __init__(self, thread: ModelThread) -> None:
        self._thread = thread
        self._caller: UdfCaller | None = None
        self._turns = CallTurns()
        self.instance: Any = None
        self.content = ""

    def construct(self, model: ModelSpec, archive: bytes, root: Path) -> None:
        """Construct the model from the run's own code, as the first action of a worker."""
        user_code.activate(user_code.unpack(archive, model.code, root))
        target, args, kwargs = user_code.load(model.payload, model.files)
        keep_arguments(args, kwargs)
        _failpoints.at_load(model.label)
        with one_process():
            made = construct(target, args, kwargs) if model.stateful else target
        self.hold(model, made)

    def hold(self, model: ModelSpec, made: Any) -> None:
        """Store a constructed model, or a function. Its modules are already imported."""
        self.instance, self.content = made, model.content
        self._caller = UdfCaller(model, made, self._thread)

    @contextlib.contextmanager
    def turn(self, is_async: bool = False) -> Iterator[UdfCaller]:
        """Wait for this call's turn, and yield the caller of the model."""
        assert self._caller is not None, "a worker without a model was given a call"
        with self._turns.turn(is_async):
            yield self._caller


class CallTurns:
    """A lock that lets either synchronous or async calls run, in the order of their arrival.

    Code between two awaits is not written for other threads beside it.
    """

    def __init__(self) -> None:
        self._is_async = False
        self._running = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self, is_async: bool = False) -> Iterator[None]:
        """Wait until no call of the other kind is running, or waits ahead of this one."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(
                lambda: (
                    self._waiting[0] is ticket and (not self._running or self._is_async == is_async)
                )
            )
            self._waiting.remove(ticket)
            self._is_async = is_async
            self._running += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
