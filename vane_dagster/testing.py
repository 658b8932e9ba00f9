"""Faults for tests of your own pipelines: errors, killed workers, storage that fails.

```python
from vane_dagster import testing

with testing.faults(
    testing.CallFault("embed", "raise", ids=[17]),
    testing.CallFault("embed", "kill", calls=3),
    testing.StorageFault("*/manifests/*", "disconnect", times=2),
) as injected:
    dg.materialize(...)
assert injected.fired == (1, 1, 2)
```

Faults are no part of the pipeline: its code, and so its fragment keys, are those of the real one,
and a run after the block takes up what the disturbed one has finished.

What starts inside the block follows it: runs of this process with their workers on any compute, and
processes that inherit its environment. The plan of the faults is kept in a folder; on a cluster of
several machines give one that all of them see. A worker that two runs use at once follows the run
that leased it last. After the block nothing fires, not in what a killed run has left queued either.

A ``disconnect`` is an error that may pass, so calls and operations are tried again after it. A call
is one of the user's code with one batch; what is tried again, or halved after an error, is called
again, and counts again.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union

from vane_dagster._arguments import one_of, positive
from vane_dagster._failpoints import FIRED, PLAN, VARIABLE
from vane_dagster._private_folder import new_temporary_folder
from vane_dagster.errors import DefinitionError

__all__ = ["CallFault", "Fault", "Injected", "LoadFault", "StorageFault", "faults"]

_CALL = ("raise", "kill", "hang", "out_of_memory", "disconnect")
_LOAD = _CALL
_STORAGE = ("no_space", "denied", "disconnect", "kill")
_OPERATIONS = ("write", "read", "list", "delete")


@dataclass(frozen=True)
class CallFault:
    """A fault in calls of a stage's function or model, in place of the call.

    Attributes:
        stage: Name of the stage, as "embed", or "docs/embed" where two pipelines have one.
        does: "raise" an error; "kill" the worker's process; "hang" until the test is over or a
            time limit ends it; "out_of_memory" as a GPU's; "disconnect", which may pass.
        ids: Only calls that hold one of these ids. Default: all.
        calls: Only these calls, a number or several, from 1 on, counted over all workers.
        times: At most so often. Default: always.
        error: With "raise", the name of the error's class: a built-in one, else one is made.
        message: The error's text.
    """

    stage: str
    does: Literal["raise", "kill", "hang", "out_of_memory", "disconnect"] = "raise"
    ids: Union[int, str, Iterable[Any], None] = None
    calls: Union[int, Iterable[int], None] = None
    times: int | None = None
    error: str | None = None
    message: str | None = None

    def __post_init__(self) -> None:
        where = _where(self, "stage", self.stage)
        one_of(where, "does", self.does, _CALL)
        if self.ids is not None and self.calls is not None:
            raise DefinitionError(
                f"{where}: ids and calls are both given; expected one of them. Use two faults"
            )
        object.__setattr__(self, "ids", _ids(where, self.ids))
        _check(where, self)


@dataclass(frozen=True)
class LoadFault:
    """A fault where a worker loads a stage's class or function, before a class is constructed.

    A worker that is warm does not load, and so does not fail.

    Attributes:
        model: Name of the class or function, whatever stages call it.
        does: As of `CallFault`.
        calls: Only these loads, a number or several, from 1 on, counted over all workers.
        times: At most so often. Default: always.
        error: With "raise", the name of the error's class: a built-in one, else one is made.
        message: The error's text.
    """

    model: str
    does: Literal["raise", "kill", "hang", "out_of_memory", "disconnect"] = "raise"
    calls: Union[int, Iterable[int], None] = None
    times: int | None = None
    error: str | None = None
    message: str | None = None

    def __post_init__(self) -> None:
        where = _where(self, "model", self.model)
        one_of(where, "does", self.does, _LOAD)
        _check(where, self)


@dataclass(frozen=True)
class StorageFault:
    """A fault in an operation on a file of the source, the store or a target, in place of it.

    Files are read and written by workers, planned and committed by the driver. What the Delta
    library itself reads and writes is left alone.

    Attributes:
        url: A pattern of URLs or paths of files, in which ``*`` stands for anything, slashes too:
            "*/parts/*", "*/manifests/*", "s3://lake/published/*". A folder's own for "list".
        operation: "write" (which publishing is too), "read", "list" or "delete".
        does: "no_space", "denied", "disconnect", which may pass, or "kill" the process.
        calls: Only these operations, a number or several, from 1 on, counted over all processes.
        times: At most so often. Default: always.
        message: The error's text.
    """

    url: str
    does: Literal["no_space", "denied", "disconnect", "kill"] = "no_space"
    operation: Literal["write", "read", "list", "delete"] = "write"
    calls: Union[int, Iterable[int], None] = None
    times: int | None = None
    message: str | None = None

    def __post_init__(self) -> None:
        where = _where(self, "url", self.url)
        one_of(where, "does", self.does, _STORAGE)
        one_of(where, "operation", self.operation, _OPERATIONS)
        _check(where, self)


Fault = Union[CallFault, LoadFault, StorageFault]


@dataclass
class Injected:
    """The faults of a block.

    Attributes:
        faults: They themselves.
    """

    faults: tuple[Fault, ...]
    _folder: Path = field(repr=False)
    _last: tuple[int, ...] | None = field(default=None, repr=False)

    @property
    def fired(self) -> tuple[int, ...]:
        """How often each fault has fired, in their order; after the block too."""
        if self._last is not None:
            return self._last
        counts = [0] * len(self.faults)
        for name in os.listdir(self._folder):
            kind, _, rest = name.partition("-")
            if kind == FIRED:
                counts[int(rest.partition("-")[0])] += 1
        return tuple(counts)


@contextmanager
def faults(*planned: Fault, folder: str | os.PathLike[str] | None = None) -> Iterator[Injected]:
    """Has runs fail as planned, until the block ends.

    Args:
        *planned: The faults. Where several fit a call or an operation, the first ones fire first.
        folder: An existing folder that all machines of the cluster see, below which the plan is
            kept. Default: the folder for temporary files.

    Raises:
        DefinitionError: If something else than a fault is given, or blocks are nested.
    """
    for fault in planned:
        if not isinstance(fault, (CallFault, LoadFault, StorageFault)):
            raise DefinitionError(
                f"faults: {fault!r} is a {type(fault).__name__}; expected CallFault, LoadFault or "
                "StorageFault"
            )
    before = os.environ.get(VARIABLE)
    if before is not None and os.path.exists(before):
        raise DefinitionError("faults: there is a block of faults already; give all in one block")
    if folder is None:
        place = new_temporary_folder("vane-faults-")
    else:
        place = Path(folder, f"vane-faults-{secrets.token_hex(8)}")
        place.mkdir(mode=0o700)
    injected = Injected(planned, place)
    try:
        with open(place / PLAN, "x") as plan:
            json.dump([_record(fault) for fault in planned], plan)
        if folder is not None:  # workers may run as another user, who can add files but not
            (place / PLAN).chmod(0o644)  # replace the plan: it exists before they may
            place.chmod(0o1777)
        os.environ[VARIABLE] = str(place)
        yield injected
    finally:
        os.environ.pop(VARIABLE, None)
        injected._last = injected.fired
        shutil.rmtree(place, ignore_errors=True)


def _record(fault: Fault) -> dict[str, Any]:
    """A fault as `failpoints.Planned`."""
    place, target = {
        CallFault: ("call", getattr(fault, "stage", "")),
        LoadFault: ("load", getattr(fault, "model", "")),
        StorageFault: ("storage", getattr(fault, "url", "").removeprefix("file://")),
    }[type(fault)]
    return {
        "place": place,
        "target": target,
        "does": fault.does,
        "ids": getattr(fault, "ids", None),
        "calls": fault.calls,
        "times": fault.times,
        "operation": getattr(fault, "operation", ""),
        "error": getattr(fault, "error", None) or "InjectedError",
        "message": fault.message or "",
    }


def _where(fault: Fault, name: str, value: Any) -> str:
    kind = type(fault).__name__
    if not isinstance(value, str) or not value:
        raise DefinitionError(f"{kind}: {name} is {value!r}; expected a text")
    return f"{kind}({value!r})"


def _check(where: str, fault: Fault) -> None:
    """Checks what all faults have in common, and brings `calls` into its one form."""
    positive(where, "times", fault.times)
    calls = fault.calls
    if calls is not None:
        listed = tuple(calls) if isinstance(calls, Iterable) else (calls,)
        if not listed:
            raise DefinitionError(f"{where}: calls is empty, so nothing would ever fail")
        for number in listed:
            positive(where, "calls", number)
        object.__setattr__(fault, "calls", listed)
    error, message = getattr(fault, "error", None), fault.message
    for name, value in (("error", error), ("message", message)):
        if value is not None and not isinstance(value, str):
            raise DefinitionError(f"{where}: {name} is {value!r}; expected a text")
    if error is not None and fault.does != "raise":
        raise DefinitionError(f"{where}: error is for does='raise', not for {fault.does!r}")
    if error is not None and not error.isidentifier():
        raise DefinitionError(f"{where}: error is {error!r}; expected the name of a class")
    if message is not None and fault.does in ("kill", "hang"):
        raise DefinitionError(
            f"{where}: with does={fault.does!r} there is no error to tell the message"
        )


def _ids(where: str, ids: Any) -> tuple[str, ...] | None:
    """Ids as texts, which is how they are compared."""
    if ids is None:
        return None
    listed = tuple(ids) if isinstance(ids, Iterable) and not isinstance(ids, str) else (ids,)
    if not listed:
        raise DefinitionError(f"{where}: ids is empty, so nothing would ever fail")
    return tuple(map(str, listed))
