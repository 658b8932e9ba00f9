"""Fault injection for tests of your own pipelines: errors, killed workers, storage failures.

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

Faults are not part of the pipeline. Its code and fragment keys are unchanged, so a run after the
block reuses everything that the disturbed run has finished.

Faults apply to everything that starts inside the block: runs of this process with their workers on
any compute, and processes that inherit its environment. The plan of the faults is kept in a folder
for temporary files, so workers on other machines follow none. A worker that two runs use at once
follows the run that leased it last. After the block nothing fires, not even in work that a
killed run left queued.

A ``disconnect`` is a transient error, so the call or operation is retried. A call passes one batch
to the user's code. A retried call, or one with a batch halved after an error, counts again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Union

from vane_dagster._arguments import one_of, positive, text
from vane_dagster._failpoints import FIRED, PLAN, VARIABLE
from vane_dagster._private_folder import new_temporary_folder
from vane_dagster.errors import DefinitionError

__all__ = ["CallFault", "Fault", "Injected", "LoadFault", "StorageFault", "faults"]

_CALL = ("raise", "kill", "hang", "out_of_memory", "disconnect")
_STORAGE = ("no_space", "denied", "disconnect", "kill")
_OPERATIONS = ("write", "read", "list", "delete")


@dataclass(frozen=True)
class CallFault:
    """A fault that replaces calls of a stage's function or model.

    Attributes:
        stage: Name of the stage, such as "embed", or "docs/embed" if two pipelines have one.
        does: "raise" an error; "kill" the worker process; "hang" until the test ends or a time
            limit expires; "out_of_memory" as a GPU raises it; "disconnect", a transient error.
        ids: Only calls that contain one of these ids. Default: all. An id of several columns is
            its text, such as "a|3".
        calls: Only these calls, one number or several, counted from 1 over all workers.
        times: The maximum number of times that it fires. Default: no limit.
        error: With "raise", the name of the exception class: a built-in class, else a new one.
        message: The error's message.
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
        object.__setattr__(self, "ids", _ids(self.ids))
        _check(where, self)


@dataclass(frozen=True)
class LoadFault:
    """A fault when a worker loads a stage's class or function, before a class is constructed.

    A warm worker does not load, so it does not fail.

    Attributes:
        model: Name of the class or function, regardless of the stages that call it.
        does: As in `CallFault`.
        calls: Only these loads, one number or several, counted from 1 over all workers.
        times: The maximum number of times that it fires. Default: no limit.
        error: With "raise", the name of the exception class: a built-in class, else a new one.
        message: The error's message.
    """

    model: str
    does: Literal["raise", "kill", "hang", "out_of_memory", "disconnect"] = "raise"
    calls: Union[int, Iterable[int], None] = None
    times: int | None = None
    error: str | None = None
    message: str | None = None

    def __post_init__(self) -> None:
        where = _where(self, "model", self.model)
        one_of(where, "does", self.does, _CALL)
        _check(where, self)


@dataclass(frozen=True)
class StorageFault:
    """A fault that replaces an operation on a file of the source, the store or a target.

    Workers read and write files; the driver plans and commits them. Reads and writes of the Delta
    library itself are not affected.

    Attributes:
        url: A pattern of file URLs or paths, such as "*/parts/*", "*/manifests/*" or
            "s3://lake/published/*". ``*`` matches any text, including slashes. For "list", the URL
            of the folder itself.
        operation: "write" (including publishing), "read", "list" or "delete".
        does: "no_space"; "denied"; "disconnect", a transient error; or "kill" the process.
        calls: Only these operations, one number or several, counted from 1 over all processes.
        times: The maximum number of times that it fires. Default: no limit.
        message: The error's message.
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
        faults: The faults, in the order given.
    """

    faults: tuple[Fault, ...]
    _folder: Path = field(repr=False)
    _last: tuple[int, ...] | None = field(default=None, repr=False)

    @property
    def fired(self) -> tuple[int, ...]:
        """How often each fault has fired, in the order of `faults`; valid after the block too."""
        if self._last is not None:
            return self._last
        counts = [0] * len(self.faults)
        for name in os.listdir(self._folder):
            kind, _, rest = name.partition("-")
            if kind == FIRED:
                counts[int(rest.partition("-")[0])] += 1
        return tuple(counts)


@contextmanager
def faults(*planned: Fault) -> Iterator[Injected]:
    """Inject faults into runs until the block ends.

    Args:
        *planned: The faults. If several match a call or an operation, they fire in this order.

    Raises:
        DefinitionError: If blocks are nested.
    """
    before = os.environ.get(VARIABLE)
    if before is not None and os.path.exists(before):
        raise DefinitionError("faults: there is a block of faults already; give all in one block")
    place = new_temporary_folder("vane-faults-")
    injected = Injected(planned, place)
    try:
        with open(place / PLAN, "x") as plan:
            json.dump([_record(fault) for fault in planned], plan)
        os.environ[VARIABLE] = str(place)
        yield injected
    finally:
        os.environ.pop(VARIABLE, None)
        injected._last = injected.fired
        shutil.rmtree(place, ignore_errors=True)


def _record(fault: Fault) -> dict[str, Any]:
    """Convert a fault to the record of a `_failpoints.PlannedFault`."""
    names = {CallFault: ("call", "stage"), LoadFault: ("load", "model")}
    place, name = names.get(type(fault), ("storage", "url"))
    record = asdict(fault)
    return {"place": place, "target": record.pop(name).removeprefix("file://"), **record}


def _where(fault: Fault, name: str, value: Any) -> str:
    kind = type(fault).__name__
    return f"{kind}({text(kind, name, value)!r})"


def _check(where: str, fault: Fault) -> None:
    """Validate the fields common to all faults, and normalize `calls`."""
    positive(where, "times", fault.times)
    calls = fault.calls
    if calls is not None:
        listed = tuple(calls) if isinstance(calls, Iterable) else (calls,)
        for number in listed:
            positive(where, "calls", number)
        object.__setattr__(fault, "calls", listed)
    error, message = getattr(fault, "error", None), fault.message
    for name, value in (("error", error), ("message", message)):
        if value is not None:
            text(where, name, value)
    if error is not None and fault.does != "raise":
        raise DefinitionError(f"{where}: error is for does='raise', not for {fault.does!r}")


def _ids(ids: Any) -> tuple[str, ...] | None:
    """Convert ids to strings, the form in which they are compared."""
    if ids is None:
        return None
    return tuple(
        map(str, ids if isinstance(ids, Iterable) and not isinstance(ids, str) else (ids,))
    )
