"""Injection points for `vane_dagster.testing`. Without a plan they do nothing.

The plan is a file in a folder that an environment variable names, so it reaches every process of a
run. Occurrences are counted in the same folder, by files that only one process can create: "the
third call" is the third call across all workers.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fnmatch
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

VARIABLE = "VANE_DAGSTER_FAULTS"
"""The environment variable that names the plan's folder."""
PLAN = "plan.json"
SEEN, FIRED = "seen", "fired"

_T = TypeVar("_T")
_OPERATIONS = {"written": "write", "read": "read", "listed": "list", "deleted from": "delete"}
_NUMBERS = {"no_space": errno.ENOSPC, "denied": errno.EACCES}
_CLASSES = {"disconnect": "ConnectionResetError", "out_of_memory": "OutOfMemoryError"}
_LOOKS_SECONDS = 0.1


@dataclass(frozen=True)
class PlannedFault:
    """A fault of the plan, with its number.

    Attributes:
        place: "call", "load" or "storage".
        target: The stage, the model, or the URL pattern.
        does: The effect of the fault.
        ids: Row ids as strings; a call must contain at least one of them. None matches any call.
        calls: The occurrences that fail, counted from 1; None for all.
        times: The maximum number of times that the fault fires; None for no limit.
        operation: The storage operation: "write", "read", "list" or "delete".
        error: Name of the exception class; None for a class of this package.
        message: The exception's message; None for one that names this package.
    """

    number: int
    place: str
    target: str
    does: str
    calls: Sequence[int] | None
    times: int | None
    message: str | None
    ids: Sequence[str] | None = None
    operation: str = ""
    error: str | None = None


def variables() -> dict[str, str]:
    """Return the variables to pass with each lease so that workers follow this process's plan."""
    return {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}


def follow(env: Mapping[str, str | None]) -> None:
    """Make this worker follow the plan of a lease, or none, replacing that of an earlier lease."""
    if VARIABLE not in env:
        os.environ.pop(VARIABLE, None)


async def at_call(
    stage: str, ids: Any, sleep: Callable[[float], Coroutine[Any, Any, None]]
) -> None:
    """Fire the faults of a call of the user's code; may raise, hang or end this process."""
    if VARIABLE in os.environ:
        for fault in _calls(stage, ids):
            if fault.does == "hang":
                while _is_on(fault):
                    await sleep(_LOOKS_SECONDS)
            else:
                _fail(fault)


def at_load(model: str) -> None:
    """Fire the faults of a model load before construction; may raise, hang or end this process."""
    if VARIABLE in os.environ:
        for fault in _planned("load"):
            if fault.target == model and _fires(fault):
                while fault.does == "hang" and _is_on(fault):
                    time.sleep(_LOOKS_SECONDS)
                if fault.does != "hang":
                    _fail(fault)


def at_storage(operation: str, url: str) -> None:
    """Fire the faults of a storage operation before it runs; may raise or end this process."""
    if VARIABLE in os.environ:
        url = url.removeprefix("file://").rstrip("/")
        for fault in _planned("storage"):
            fits = fault.operation == operation and fnmatch.fnmatchcase(url, fault.target)
            if fits and _fires(fault):
                _fail(fault)


def failing(verb: str, url: str, action: Callable[[], _T]) -> Callable[[], _T]:
    """Wrap a storage operation so that it fails as planned."""
    if VARIABLE not in os.environ or verb not in _OPERATIONS:
        return action
    operation = _OPERATIONS[verb]

    def run() -> _T:
        at_storage(operation, url)
        return action()

    return run


def _calls(stage: str, ids: Any) -> Iterator[PlannedFault]:
    """Yield the faults that fire for a call of a stage."""
    held: set[str] | None = None
    for fault in _planned("call"):
        if fault.target not in (stage, stage.rpartition("/")[2]):
            continue
        if fault.ids is not None:
            if held is None:
                held = set(map(str, ids.to_pylist()))
            if held.isdisjoint(fault.ids):
                continue
        if _fires(fault):
            yield fault


def _planned(place: str) -> Iterable[PlannedFault]:
    try:
        folder = os.environ.get(VARIABLE, "")
        os.stat(folder)
        return [f for f in _plan(folder) if f.place == place]
    except (FileNotFoundError, NotADirectoryError):  # the test has ended, or is on another machine
        return ()


@lru_cache(maxsize=8)
def _plan(folder: str) -> tuple[PlannedFault, ...]:
    with open(os.path.join(folder, PLAN)) as file:
        records = json.load(file)
    return tuple(PlannedFault(number, **record) for number, record in enumerate(records))


def _is_on(fault: PlannedFault) -> bool:
    return fault in _planned(fault.place)


def _fires(fault: PlannedFault) -> bool:
    """Record an occurrence, and return whether it fails."""
    if fault.calls is not None and _counted(fault, SEEN, None) not in fault.calls:
        return False
    return _counted(fault, FIRED, fault.times) is not None


def _counted(fault: PlannedFault, what: str, most: int | None) -> int | None:
    """Return this occurrence's number across all processes; None if it exceeds `most`."""
    folder, prefix = os.environ.get(VARIABLE, ""), f"{what}-{fault.number}-"
    try:
        number = sum(name.startswith(prefix) for name in os.listdir(folder))
        while most is None or number < most:
            number += 1
            with contextlib.suppress(FileExistsError):  # another process had this number
                os.close(os.open(os.path.join(folder, f"{prefix}{number}"), os.O_CREAT | os.O_EXCL))
                return number
    except FileNotFoundError:  # the test has ended
        pass
    return None


def _fail(fault: PlannedFault) -> NoReturn:
    if fault.does == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if (number := _NUMBERS.get(fault.does)) is not None:
        raise OSError(number, fault.message or os.strerror(number))
    text = fault.message or f"injected by vane_dagster.testing into {fault.target}"
    raise _error_class(_CLASSES.get(fault.does) or fault.error or "InjectedError")(text)


@lru_cache(maxsize=64)
def _error_class(name: str) -> type[Exception]:
    """Return the built-in exception with this name, or else a new class of that name."""
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    return type(name, (Exception,), {"__module__": __name__})
