"""Exceptions of user code, made safe to inspect, print and send.

Every exception that user code raises in a batch or a constructor is treated as the user's error,
regardless of its class: `KeyboardInterrupt`, `SystemExit` and `asyncio.CancelledError` too. The
package never interrupts a worker with an exception of its own; a run is cancelled between batches.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa

from vane_dagster._keywords import columns_listed
from vane_dagster._worker_process import is_worker
from vane_dagster.errors import CostlyError, RowErrors
from vane_dagster.retries import CALLS, http_status, is_transient

_MAX_CHARACTERS = 20_000
_MAX_INNER = 5
_QUOTED = re.compile(r"""["'](.+?)["']""")
_ARROW = (pa.Table, pa.RecordBatch, pa.ChunkedArray, pa.Array)
_AS_PANDAS = (
    'Batches are Arrow tables, with columns as batch["name"]; for pandas data frames, declare '
    'batch_format="pandas"'
)
_NOT_SET = (
    "The environment variable is not set in the worker. Set it where the run is launched, and name "
    "it in vd.Workers(env_vars=...) or keyed_env_vars: workers on Ray have the environment of the "
    "process that started the cluster"
)
_NOT_SENT = (
    "Workers have a copy of your modules, without the files beside them, also of an installed "
    "package. Pass the file's path as an argument, as vd.local_file(path), or its content"
)


class Raised(Exception):
    """A replacement for an exception that is not safe to handle. Subclasses have its names."""


class RaisedCostly(Raised, CostlyError):
    """A replacement for a `CostlyError`: what the row used is counted nevertheless."""


def contained(error: Any) -> BaseException:
    """Turn an exception of user code into one that is safe to inspect, print and send.

    This is the exception itself if it is well-behaved. It is replaced if its text cannot be made,
    is huge or is not valid UTF-8, if it is a group, or if it is not an `Exception`. The replacement
    has the same class names, the traceback and the costs of a `CostlyError`. Its text is of limited
    length and includes the texts of a group's inner exceptions.
    """
    with contextlib.suppress(BaseException):  # raised by the exception's own code
        if isinstance(error, RowErrors):
            each = {place: contained(inner) for place, inner in error.errors.items()}
            return RowErrors(each, error.rows, used=error.used).with_traceback(error.__traceback__)
        if _behaves(error):
            return error  # type: ignore[no-any-return]  # `_behaves` ensures the type
    return _stand_in(error)


def hint(
    error: BaseException, columns: Collection[str] = (), others: Collection[str] = ()
) -> str | None:
    """Return what to write instead of a common mistake; None for others."""
    if isinstance(error, ModuleNotFoundError):
        return (
            f"Install {error.name!r} where the workers run, or import it so that it is found as "
            "one of your own modules"
        )
    if is_worker() and _is_of_environment(error):
        return _NOT_SET
    if type(error) is KeyError and columns and error.args:
        quoted = _QUOTED.search(str(error.args[0]))  # as pyarrow and pandas word it
        key = quoted.group(1) if quoted else str(error.args[0])
        if key in columns:
            return None
        if key in others:
            return f'The code gets only the columns that it names; name "{key}" in columns='
        return f"The batch has the columns {columns_listed(columns, key)}"
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
        if is_worker() and error.filename.startswith(os.path.join(sys.path[0], "")):
            return _NOT_SENT
        return (
            None
            if os.path.isabs(error.filename)
            else (
                f"The worker looked for it in {os.getcwd()!r}. Pass a file of the project as "
                f"vd.local_file({error.filename!r})"
            )
        )
    if isinstance(error, AttributeError) and isinstance(error.obj, _ARROW):
        return _AS_PANDAS
    if isinstance(error, TypeError) and "'pyarrow.lib." in str(error):
        return _AS_PANDAS  # such as `batch["x"] = ...` or `+`
    return None


def hinted(
    error: BaseException, columns: Collection[str] = (), others: Collection[str] = ()
) -> BaseException:
    """Return the error with its `hint` at the end of its text, if there is one."""
    if isinstance(error, RowErrors):
        each = {place: hinted(inner, columns, others) for place, inner in error.errors.items()}
        return RowErrors(each, error.rows, used=error.used).with_traceback(error.__traceback__)
    kind = type(error)
    text = hint(error, columns, others) if kind.__module__ == "builtins" else None
    if text is None:
        return error
    shown = {"__module__": kind.__module__, "__str__": lambda self: self.args[0]}
    made: BaseException = type(kind.__name__, (kind,), shown)(f"{error}. {text}")
    return made.with_traceback(error.__traceback__)


def is_shutdown(error: BaseException) -> bool:
    """Return whether Ray raised this to end the worker, on SIGTERM or by `exit_actor`."""
    return type(error) is SystemExit and hasattr(error, "ray_terminate_msg")


def _behaves(error: Any) -> bool:
    if error.__class__ is not type(error) or not isinstance(error, Exception) or _inner(error):
        return False
    is_transient(error), CALLS.after(error, 1)  # both read the exception's own attributes
    texts = [str(error), repr(error), *getattr(error, "__notes__", ())]
    return sum(map(len, texts)) <= _MAX_CHARACTERS and all(t == clean(t) for t in texts)


def _is_of_environment(error: BaseException) -> bool:
    """Return whether ``os.environ[...]`` has raised an error."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return type(error) is KeyError and frames[-1:] == [type(os.environ).__getitem__.__code__]


def _stand_in(error: Any) -> BaseException:
    """Return an exception of new classes with the names of the original's classes."""
    kind: type[BaseException] = RaisedCostly if issubclass(type(error), CostlyError) else Raised
    ends = (Exception, BaseException, object)
    for base in reversed([each for each in type(error).__mro__ if each not in ends]):
        kind = type(base.__name__, (kind,), {"__module__": Raised.__module__})
    if type(error) is BaseException:
        kind = type("BaseException", (kind,), {"__module__": Raised.__module__})
    texts = [_text(error), *(f"{type(e).__name__}: {_text(e)}" for e in _leaves(error))]
    made = kind(clean("; ".join(texts))[:_MAX_CHARACTERS])
    made.__traceback__ = getattr(error, "__traceback__", None)
    with contextlib.suppress(BaseException):
        made.status_code = http_status(error)  # type: ignore[attr-defined]  # of the class made above
    with contextlib.suppress(BaseException):
        made.used = dict(error.used)  # type: ignore[attr-defined]  # of a `RaisedCostly`
    return made


def _text(error: Any) -> str:
    try:
        return str(error)[:_MAX_CHARACTERS]
    except BaseException as failed:
        return f"<str() of the exception raised {type(failed).__name__}>"


def _leaves(error: Any) -> Iterator[Any]:
    """Yield the first exceptions in a group and its nested groups; none for any other exception."""
    for each in _inner(error)[:_MAX_INNER]:
        yield from _leaves(each) if _inner(each) else (each,)


def _inner(error: Any) -> Sequence[Any]:
    """Return the exceptions of a group."""
    return error.exceptions if issubclass(type(error), BaseExceptionGroup) else ()


def clean(text: str) -> str:
    """Return the text without characters that Arrow, JSON or a database reject."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
