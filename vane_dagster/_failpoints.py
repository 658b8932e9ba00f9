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
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, TypeVar

VARIABLE = "VANE_DAGSTER_FAULTS"
"""The environment variable that names the plan's folder."""
PLAN = "plan.json"
"""The faults: the fields of `vane_dagster.testing`, with their `place` and `target`."""
SEEN, FIRED = "seen", "fired"

_T = TypeVar("_T")
_Numbered = tuple[int, Any]
"""A fault, and its place in the plan."""
_OPERATIONS = {"written": "write", "read": "read", "listed": "list", "deleted from": "delete"}
_NUMBERS = {"no_space": errno.ENOSPC, "denied": errno.EACCES}
_CLASSES = {"disconnect": "ConnectionResetError", "out_of_memory": "OutOfMemoryError"}
_LOOKS_SECONDS = 0.1


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
        for number, fault in _calls(stage, ids):
            while fault.does == "hang" and _is_on(number, fault):
                await sleep(_LOOKS_SECONDS)
            _fail(fault)


def at_load(model: str) -> None:
    """Fire the faults of a model load before construction; may raise, hang or end this process."""
    if VARIABLE in os.environ:
        for number, fault in _planned("load"):
            if fault.target == model and _fires(number, fault):
                while fault.does == "hang" and _is_on(number, fault):
                    time.sleep(_LOOKS_SECONDS)
                _fail(fault)


def at_storage(operation: str, url: str) -> None:
    """Fire the faults of a storage operation before it runs; may raise or end this process."""
    if VARIABLE in os.environ:
        url = url.removeprefix("file://").rstrip("/")
        for number, fault in _planned("storage"):
            fits = fault.operation == operation and fnmatch.fnmatchcase(url, fault.target)
            if fits and _fires(number, fault):
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


def _calls(stage: str, ids: Any) -> Iterator[_Numbered]:
    """Yield the faults that fire for a call of a stage."""
    held: set[str] | None = None
    for number, fault in _planned("call"):
        if fault.target not in (stage, stage.rpartition("/")[2]):
            continue
        if fault.ids is not None:
            if held is None:
                held = set(map(str, ids.to_pylist()))
            if held.isdisjoint(fault.ids):
                continue
        if _fires(number, fault):
            yield number, fault


def _planned(place: str) -> Iterable[_Numbered]:
    try:
        folder = os.environ.get(VARIABLE, "")
        os.stat(folder)
        return [(n, fault) for n, fault in enumerate(_plan(folder)) if fault.place == place]
    except (FileNotFoundError, NotADirectoryError):  # the test has ended, or is on another machine
        return ()


@lru_cache(maxsize=8)
def _plan(folder: str) -> tuple[Any, ...]:
    with open(os.path.join(folder, PLAN)) as file:
        return tuple(SimpleNamespace(**record) for record in json.load(file))


def _is_on(number: int, fault: Any) -> bool:
    return (number, fault) in _planned(fault.place)


def _fires(number: int, fault: Any) -> bool:
    """Record an occurrence, and return whether it fails."""
    if fault.calls is not None and _counted(number, SEEN, None) not in fault.calls:
        return False
    return _counted(number, FIRED, fault.times) is not None


def _counted(fault: int, what: str, most: int | None) -> int | None:
    """Return this occurrence's number across all processes; None if it exceeds `most`."""
    folder, prefix = os.environ.get(VARIABLE, ""), f"{what}-{fault}-"
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


def _fail(fault: Any) -> None:
    """Fail as a fault says; one that hangs does not, once it is over."""
    if fault.does == "hang":
        return
    if fault.does == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if (number := _NUMBERS.get(fault.does)) is not None:
        raise OSError(number, fault.message or os.strerror(number))
    text = fault.message or f"injected by vane_dagster.testing into {fault.target}"
    name = _CLASSES.get(fault.does) or getattr(fault, "error", None)
    raise _error_class(name or "InjectedError")(text)


@lru_cache(maxsize=64)
def _error_class(name: str) -> type[Exception]:
    """Return the built-in exception with this name, or else a new class of that name."""
    builtin = getattr(builtins, name, None)
    if isinstance(builtin, type) and issubclass(builtin, Exception):
        return builtin
    return type(name, (Exception,), {"__module__": __name__})
