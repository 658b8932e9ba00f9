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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Union

from vane_dagster._arguments import one_of, positive, text
from vane_dagster._failpoints import FIRED, PLAN, VARIABLE
from vane_dagster._private_folder import new_temporary_folder
from vane_dagster.errors import DefinitionError

__all__ = ["CallFault", "Fault", "Injected", "LoadFault", "StorageFault", "faults"]

_CALL = ("raise", "kill", "hang", "out_of_memory", "disconnect")
_OPERATIONS = ("write", "read", "list", "delete")


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """What faults have in common.

    Attributes:
        calls: Only these occurrences, one number or several, counted from 1 over all processes.
        times: The maximum number of times that it fires. Default: no limit.
        message: The error's message.
    """

    calls: Union[int, Iterable[int], None] = None
    times: int | None = None
    message: str | None = None
    _place: ClassVar[str]
    _named: ClassVar[str]
    _effects: ClassVar[tuple[str, ...]] = _CALL

    @property
    def _target(self) -> str:
        """The stage, the model, or the pattern of URLs."""
        return str(getattr(self, self._named)).removeprefix("file://")

    def __post_init__(self) -> None:
        kind, given = type(self).__name__, vars(self)
        where = f"{kind}({text(kind, self._named, given[self._named])!r})"
        one_of(where, "does", given["does"], self._effects)
        one_of(where, "operation", given.get("operation", "read"), _OPERATIONS)
        positive(where, "times", self.times)
        if self.calls is not None:
            listed = tuple(self.calls) if isinstance(self.calls, Iterable) else (self.calls,)
            for number in listed:
                positive(where, "calls", number)
            object.__setattr__(self, "calls", listed)
        for name in ("error", "message"):
            if given.get(name) is not None:
                text(where, name, given[name])
        if given.get("error") is not None and given["does"] != "raise":
            raise DefinitionError(f"{where}: error is for does='raise', not for {given['does']!r}")
        if given.get("ids") is not None:
            object.__setattr__(self, "ids", _ids(given["ids"]))


@dataclass(frozen=True)
class CallFault(_Fault):
    """A fault that replaces calls of a stage's function or model.

    Attributes:
        stage: Name of the stage, such as "embed", or "docs/embed" if two pipelines have one.
        does: "raise" an error; "kill" the worker process; "hang" until the test ends or a time
            limit expires; "out_of_memory" as a GPU raises it; "disconnect", a transient error.
        ids: Only calls that contain one of these ids. Default: all. An id of several columns is
            its text, such as "a|3".
        error: With "raise", the name of the exception class: a built-in class, else a new one.
        calls: Only these calls, one number or several, counted from 1 over all workers; with
            `ids`, among the calls that contain one.
        times: The maximum number of times that it fires. Default: no limit.
        message: The error's message.
    """

    stage: str
    does: Literal["raise", "kill", "hang", "out_of_memory", "disconnect"] = "raise"
    ids: Union[int, str, Iterable[Any], None] = None
    error: str | None = field(default=None, kw_only=True)
    _place: ClassVar[str] = "call"
    _named: ClassVar[str] = "stage"


@dataclass(frozen=True)
class LoadFault(_Fault):
    """A fault when a worker loads a stage's class or function, before a class is constructed.

    A warm worker does not load, so it does not fail.

    Attributes:
        model: Name of the class or function, regardless of the stages that call it.
        does: As in `CallFault`.
        error: With "raise", the name of the exception class: a built-in class, else a new one.
        calls: Only these loads, one number or several, counted from 1 over all workers.
        times: The maximum number of times that it fires. Default: no limit.
        message: The error's message.
    """

    model: str
    does: Literal["raise", "kill", "hang", "out_of_memory", "disconnect"] = "raise"
    error: str | None = field(default=None, kw_only=True)
    _place: ClassVar[str] = "load"
    _named: ClassVar[str] = "model"


@dataclass(frozen=True)
class StorageFault(_Fault):
    """A fault that replaces an operation on a file of the source, the store or a target.

    Workers read and write files; the driver plans and commits them. Reads and writes of the Delta
    library itself are not affected.

    Attributes:
        url: A pattern of file URLs or paths, such as "*/parts/*", "*/manifests/*" or
            "s3://lake/published/*". ``*`` matches any text, including slashes. For "list", the URL
            of the folder itself.
        does: "no_space"; "denied"; "disconnect", a transient error; or "kill" the process.
        operation: "write" (including publishing), "read", "list" or "delete".
        calls: Only these operations, one number or several, counted from 1 over all processes.
        times: The maximum number of times that it fires. Default: no limit.
        message: The error's message.
    """

    url: str
    does: Literal["no_space", "denied", "disconnect", "kill"] = "no_space"
    operation: Literal["write", "read", "list", "delete"] = "write"
    _place: ClassVar[str] = "storage"
    _named: ClassVar[str] = "url"
    _effects: ClassVar[tuple[str, ...]] = ("no_space", "denied", "disconnect", "kill")


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
        records = [{"place": each._place, "target": each._target, **vars(each)} for each in planned]
        (place / PLAN).write_text(json.dumps(records))
        os.environ[VARIABLE] = str(place)
        yield injected
    finally:
        os.environ.pop(VARIABLE, None)
        injected._last = injected.fired
        shutil.rmtree(place, ignore_errors=True)


def _ids(ids: Any) -> tuple[str, ...] | None:
    """Convert ids to strings, the form in which they are compared."""
    if ids is None:
        return None
    return tuple(
        map(str, ids if isinstance(ids, Iterable) and not isinstance(ids, str) else (ids,))
    )
