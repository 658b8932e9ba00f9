"""The versions of a model's code in one worker, on the state that was constructed once.

A version is the code that the run's driver had on disk: a folder of modules, and the class or
function in them. An edit that does not affect the constructor makes a new version of the pool's
model. Its modules are imported beside the old ones, and a view of the new class shares the state of
the constructed instance. Only one version's modules are in `sys.modules` at a time, those of the
running calls, so imports inside calls resolve to the right modules.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vane_dagster import _failpoints
from vane_dagster._secrets import keep_arguments, masked
from vane_dagster._user_errors import contained, is_shutdown
from vane_dagster.errors import described
from vane_dagster.pipeline.lazy_instances import construct
from vane_dagster.worker import user_code
from vane_dagster.worker.health import UnhealthyModelError
from vane_dagster.worker.isolation import one_process
from vane_dagster.worker.model_thread import ModelThread
from vane_dagster.worker.protocol import ModelSpec
from vane_dagster.worker.state_mark import state_fingerprint
from vane_dagster.worker.udf_caller import UdfCaller

MAX_VERSIONS = 8
"""Versions kept in a worker; the least recently called one is dropped first."""


class OtherCodeError(Exception):
    """A worker cannot serve a run, because it holds a model that other code constructed."""


@dataclass(frozen=True)
class _Version:
    folder: Path | None
    caller: UdfCaller


class ModelVersions:
    """The constructed model of a worker, and the versions of the code that can be called on it.

    Args:
        thread: The thread that constructs the model.

    Attributes:
        instance: The constructed model; None before.
    """

    def __init__(self, thread: ModelThread) -> None:
        self._thread = thread
        self._made: ModelSpec | None = None
        self.instance: Any = None
        self._mark: object = None
        self._packages: frozenset[str] = frozenset()
        self._versions: OrderedDict[str, _Version] = OrderedDict()
        self._turns = VersionLock()

    def construct(self, model: ModelSpec, archive: bytes, root: Path) -> None:
        """Construct the model from the run's own code, as the first action of a worker.

        Args:
            model: The model.
            archive: The user's modules, as a zip.
            root: The folder to unpack them below.
        """
        folder = user_code.unpack(archive, model.code, root)
        user_code.activate(folder)
        target, args, kwargs = user_code.load(model.payload, model.files)
        keep_arguments(args, kwargs)
        _failpoints.at_load(model.label)
        with one_process():
            made = construct(target, args, kwargs) if model.stateful else target
        self.hold(model, made, folder)

    def hold(self, model: ModelSpec, made: Any, folder: Path | None = None) -> None:
        """Store a constructed model, or a function. Its modules are already active.

        Args:
            model: The model.
            made: The constructed instance, or the function.
            folder: The folder of its modules, if there is one.
        """
        self._made, self.instance = model, made
        if model.shares_state and model.stateful:
            names = [] if folder is None else [path.stem for path in folder.iterdir()]
            self._packages = frozenset(names)
            self._mark = state_fingerprint(made, self._packages)
        self._versions[model.content] = _Version(folder, UdfCaller(model, made, self._thread))
        self._turns.active = model.content

    def adopt(self, model: ModelSpec, archive: bytes, root: Path) -> bool:
        """Prepare the constructed model for calls of a run's code.

        Args:
            model: The model as the run specifies it.
            archive: The user's modules, as a zip.
            root: The folder to unpack them below.

        Returns:
            Whether modules were imported for it.

        Raises:
            OtherCodeError: If other code constructed the model, and it cannot be shared.
        """
        made = self._made
        assert made is not None, "nothing is constructed yet"
        if made.content == model.content:
            return False
        if model.exact:
            raise OtherCodeError("holds a model that other code has constructed")
        if not model.shares_state or model.content in self._versions:
            return False  # state is not shared: the text differs, the identity is the same
        with self._turns.turn(model.content, lambda: self._import(model, archive, root)):
            self._keep(model.content)
        return True

    def _import(self, model: ModelSpec, archive: bytes, root: Path) -> None:
        """Import the modules of a version, and make a caller that shares the state."""
        assert self._made is not None
        self._check_state()
        folder = user_code.unpack(archive, model.code, root)
        try:
            user_code.activate(folder)
            target, args, kwargs = user_code.load(model.payload, model.files)
            keep_arguments(args, kwargs)
            shared = view(target, self.instance) if model.stateful else target
        except BaseException as error:  # a user's module may raise anything when it is imported
            if is_shutdown(error):
                raise
            cause = contained(error)
            self._drop(folder)
            text = masked(described(cause))
            raise OtherCodeError(f"cannot take over this run's code ({text})") from None
        first = self._versions[self._made.content].caller
        self._versions[model.content] = _Version(folder, first.of_version(model, shared))

    def _check_state(self) -> None:
        """Raise OtherCodeError if calls may have changed the state since it was constructed."""
        assert self._made is not None
        if self._made.stateful and self._mark != state_fingerprint(self.instance, self._packages):
            raise OtherCodeError("holds a model whose state calls of other code may have changed")

    def _drop(self, folder: Path) -> None:
        """Drop the modules of a folder, unless another version uses it."""
        assert self._made is not None
        self._activate(self._versions[self._made.content])
        self._discard(folder)

    def _discard(self, folder: Path | None) -> None:
        if folder and all(version.folder != folder for version in self._versions.values()):
            user_code.discard(folder)

    def _keep(self, content: str) -> None:
        """Mark a version as used, and drop the least recently used one if there are too many."""
        assert self._made is not None
        self._versions.move_to_end(content)
        self._versions.move_to_end(self._made.content)  # the other versions are views of it
        if len(self._versions) > MAX_VERSIONS:
            _, gone = self._versions.popitem(last=False)
            self._discard(gone.folder)

    @contextlib.contextmanager
    def turn(self, content: str, is_async: bool = False) -> Iterator[UdfCaller]:
        """Yield the caller of a version, with its modules active; "" means the constructed version.

        Args:
            content: The version.
            is_async: Whether the call is async; such calls of one version run at the same time.

        Raises:
            UnhealthyModelError: If the worker does not have the version.
        """
        assert self._made is not None, "a worker without a model was given a call"
        content = content or self._made.content
        with self._turns.turn(content, lambda: self._switch(content), is_async):
            self._keep(content)
            yield self._versions[content].caller

    def _switch(self, content: str) -> None:
        if content not in self._versions:
            raise UnhealthyModelError(
                OtherCodeError("it no longer has this run's code"), rows=False
            )
        if len(self._versions) > 1:
            try:
                self._check_state()
            except OtherCodeError as error:
                raise UnhealthyModelError(error, rows=False) from None
        self._activate(self._versions[content])

    def _activate(self, version: _Version) -> None:
        if version.folder is not None:
            user_code.activate(version.folder)


def view(cls: type, instance: Any) -> Any:
    """Create an object that shares the state of an instance of another version of its class.

    Args:
        cls: The class.
        instance: An instance of another version of the class.
    """
    shared: Any = object.__new__(cls)
    object.__setattr__(shared, "__dict__", instance.__dict__)  # a frozen class has its own
    return shared


class VersionLock:
    """A lock that runs calls of one version at a time, in the order of their arrival.

    Async and synchronous calls do not run at the same time either: code between two awaits is not
    written for other threads beside it.

    Attributes:
        active: The version with active modules; empty if there is none.
    """

    def __init__(self) -> None:
        self.active = ""
        self._is_async = False
        self._running = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(
        self, content: str, switch: Callable[[], None], is_async: bool = False
    ) -> Iterator[None]:
        """Wait until no call of another version or kind is running, or waits ahead of this one.

        Args:
            content: The version.
            switch: Activates the version's modules, if they are not active.
            is_async: Whether the call is async.
        """
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._is_next(ticket, content, is_async))
                if self.active != content:
                    self.active = ""  # in case the switch fails
                    switch()
                    self.active = content
                self._is_async = is_async
                self._running += 1
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _is_next(self, ticket: object, content: str, is_async: bool) -> bool:
        alike = (self.active, self._is_async) == (content, is_async)
        return self._waiting[0] is ticket and (not self._running or alike)
