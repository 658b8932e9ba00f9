"""Places where `vane_dagster.testing` has the package fail; without a plan they do nothing.

The plan is a file in the folder that an environment variable names, so that it reaches every
process of a run. What has happened is counted there too, by files that only one process can create:
"the third call" is the third of all workers.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import fnmatch
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

VARIABLE = "VANE_DAGSTER_FAULTS"
"""The environment variable with the folder of the plan."""
PLAN = "plan.json"
SEEN, FIRED = "seen", "fired"

_T = TypeVar("_T")
_OPERATIONS = {"written": "write", "read": "read", "listed": "list", "deleted from": "delete"}
_LOOKS_SECONDS = 0.1


@dataclass(frozen=True)
class PlannedFault:
    """A fault as the plan holds it, and its number there.

    Attributes:
        place: "call", "load" or "storage".
        target: The stage, the model, or the pattern of URLs.
        does: What happens.
        ids: As texts, the ids of which a call must hold one; None for any.
        calls: Which of the occurrences fail, from 1 on; None for all.
        times: How often it fires at most; None for as often as it may.
        operation: "write", "read", "list" or "delete", of storage.
        error: Name of the class that is raised.
        message: Its text.
    """

    number: int
    place: str
    target: str
    does: str
    ids: frozenset[str] | None
    calls: frozenset[int] | None
    times: int | None
    operation: str
    error: str
    message: str


def variables() -> dict[str, str]:
    """What a worker has to be told with each lease, so that it follows this process's plan."""
    return {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}


def follow(env: Mapping[str, str]) -> None:
    """Has this worker follow the plan of a lease, or none; a former lease may have had one."""
    if VARIABLE not in env:
        os.environ.pop(VARIABLE, None)


def at_call(stage: str, ids: Any) -> None:
    """Before the user's code is called: may raise, hang or end this process.

    Args:
        stage: Pipeline and stage.
        ids: The batch's ids, as an Arrow array.
    """
    if VARIABLE in os.environ:
        for fault in _calls(stage, ids):
            if fault.does == "hang":
                while _is_on(fault):
                    time.sleep(_LOOKS_SECONDS)
            else:
                _fail(fault)


async def at_call_later(stage: str, ids: Any) -> None:
    """As `at_call`; other calls of the loop go on meanwhile."""
    if VARIABLE in os.environ:
        for fault in _calls(stage, ids):
            if fault.does == "hang":
                while _is_on(fault):
                    await asyncio.sleep(_LOOKS_SECONDS)
            else:
                _fail(fault)


def at_load(model: str) -> None:
    """Before a model is constructed: may raise, hang or end this process."""
    if VARIABLE in os.environ:
        for fault in _planned("load"):
            if fault.target == model and _fires(fault):
                while fault.does == "hang" and _is_on(fault):
                    time.sleep(_LOOKS_SECONDS)
                if fault.does != "hang":
                    _fail(fault)


def at_storage(operation: str, url: str) -> None:
    """Before an operation on a file or folder: may raise or end this process."""
    if VARIABLE in os.environ:
        url = url.removeprefix("file://").rstrip("/")
        for fault in _planned("storage"):
            fits = fault.operation == operation and fnmatch.fnmatchcase(url, fault.target)
            if fits and _fires(fault):
                _fail(fault)


def failing(verb: str, url: str, action: Callable[[], _T]) -> Callable[[], _T]:
    """An operation on storage that fails as planned.

    Args:
        verb: What it does, in the words of `Location.tried`.
        url: The file or folder that it is about.
        action: The operation.
    """
    if VARIABLE not in os.environ or verb not in _OPERATIONS:
        return action
    operation = _OPERATIONS[verb]

    def run() -> _T:
        at_storage(operation, url)
        return action()

    return run


def _calls(stage: str, ids: Any) -> Iterator[PlannedFault]:
    """The faults that a call of a stage fires."""
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
        return [f for f in _plan(_folder()) if f.place == place]
    except (FileNotFoundError, NotADirectoryError):  # the test is over, or on another machine
        return ()


@lru_cache(maxsize=8)
def _plan(folder: str) -> tuple[PlannedFault, ...]:
    with open(os.path.join(folder, PLAN)) as file:
        records = json.load(file)
    return tuple(
        PlannedFault(
            number=number,
            **{
                **record,
                "ids": None if record["ids"] is None else frozenset(record["ids"]),
                "calls": None if record["calls"] is None else frozenset(record["calls"]),
            },
        )
        for number, record in enumerate(records)
    )


def _folder() -> str:
    """The plan's folder, which is gone after the test."""
    folder = os.environ.get(VARIABLE, "")
    os.stat(folder)
    return folder


def _is_on(fault: PlannedFault) -> bool:
    return fault in _planned(fault.place)


def _fires(fault: PlannedFault) -> bool:
    """Takes note of an occurrence; whether it is one that fails."""
    if fault.calls is not None and _counted(fault, SEEN, None) not in fault.calls:
        return False
    return _counted(fault, FIRED, fault.times) is not None


_reached: dict[tuple[str, int, str], int] = {}
_lock = threading.Lock()


def _counted(fault: PlannedFault, what: str, most: int | None) -> int | None:
    """The number of this occurrence among those of all processes; None past the most."""
    folder = os.environ.get(VARIABLE, "")
    key = (folder, fault.number, what)
    with _lock:
        number = _reached.get(key, 0)
        while most is None or number < most:
            number += 1
            try:
                path = os.path.join(folder, f"{what}-{fault.number}-{number}")
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            except FileNotFoundError:  # the test is over
                return None
            _reached[key] = number
            return number
        return None


def _fail(fault: PlannedFault) -> NoReturn:
    if fault.does == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.does == "no_space":
        raise OSError(errno.ENOSPC, fault.message or os.strerror(errno.ENOSPC))
    if fault.does == "denied":
        raise PermissionError(errno.EACCES, fault.message or os.strerror(errno.EACCES))
    text = fault.message or f"injected by vane_dagster.testing into {fault.target}"
    if fault.does == "disconnect":
        raise ConnectionResetError(text)
    if fault.does == "out_of_memory":
        raise _error_class("OutOfMemoryError")(text)
    raise _error_class(fault.error)(text)


@lru_cache(maxsize=64)
def _error_class(name: str) -> type[Exception]:
    """The built-in exception of a name, else a new class that is called so."""
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    return type(name, (Exception,), {"__module__": __name__})
