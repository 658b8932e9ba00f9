"""Rows whose exceptions are hard to handle, and code that closes what belongs to the worker."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import io
import os
import resource
from pathlib import Path

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import failure
from vane_dagster.storage.transient_errors import is_transient
from vane_dagster.worker.output import OutputTap
from vane_dagster.worker.row_errors import user_traceback
from vane_dagster.worker.user_errors import contained, is_shutdown

ROWS = 20
BAD = 7
Group = getattr(builtins, "BaseExceptionGroup", None)  # from Python 3.11 on


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class NoRepr(Exception):
    def __repr__(self) -> str:
        raise KeyboardInterrupt


class Liar(ConnectionError):
    @property
    def __class__(self):
        raise ValueError("no class")

    @property
    def __traceback__(self):
        raise ValueError("no traceback")


class NoStatus(Exception):
    @property
    def status_code(self):
        raise SystemExit(3)


class Nameless(type):
    __name__ = property(lambda cls: 1 / 0)


class Unnamed(Exception, metaclass=Nameless):
    pass


class NotPickled(Exception):
    def __reduce__(self):
        raise TypeError("not pickled")


def local_class() -> BaseException:
    class OnlyHere(Exception):
        pass

    return OnlyHere("of the worker alone")


def odd_syntax_error() -> BaseException:
    error = SyntaxError("odd")
    error.lineno, error.text, error.filename, error.offset = "abc", 5, 3, "q"
    return error


def odd_file_name() -> BaseException:
    exec(compile("raise ValueError('x')", "a\udcffb", "exec"))
    raise AssertionError("unreachable")


EXCEPTIONS = {
    "SyntaxError": odd_syntax_error,
    "FileName": odd_file_name,
    "CancelledError": lambda: asyncio.CancelledError(),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("stop"),
    "GeneratorExit": lambda: GeneratorExit(),
    "SystemExit": lambda: SystemExit(3),
    "StopIteration": lambda: StopIteration(3),
    "BaseException": lambda: BaseException("base"),
    "NoText": lambda: NoText(),
    "NoRepr": lambda: NoRepr("text"),
    "Liar": lambda: Liar("lies"),
    "NoStatus": lambda: NoStatus("status"),
    "Unnamed": lambda: Unnamed("unnamed"),
    "NotPickled": lambda: NotPickled("pickle"),
    "OnlyHere": local_class,
    "Surrogates": lambda: ValueError("a\udc00b\0c"),
    "Huge": lambda: ValueError("x" * 100_000_000),
}
if Group is not None:
    EXCEPTIONS["BaseExceptionGroup"] = lambda: Group(
        "several", [ValueError("the first"), KeyboardInterrupt("the second")]
    )
    EXCEPTIONS["ExceptionGroup"] = lambda: Group("several", [KeyError("inner")])


# The text of an exception


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_every_exception_is_made_safe(name):
    try:
        raise EXCEPTIONS[name]()
    except BaseException as raised:
        error = contained(raised)

    kind = "ValueError" if name in ("Surrogates", "Huge", "FileName") else name
    assert isinstance(error, Exception)
    assert type(error).__name__ == kind
    assert len(str(error)) <= 20_000
    pa.array([str(error), repr(error), user_traceback(error)]).cast(pa.binary()).cast(pa.string())
    assert "test_poison.py" in user_traceback(error)
    assert is_transient(error) == (name == "Liar")


def test_an_exception_that_behaves_stays_as_it_is():
    error = ConnectionError("reset")
    assert contained(error) is error


def raises_twice() -> None:
    try:
        raise Liar("first")
    except Liar:
        raise ValueError("second")  # noqa: B904 - the context is what is tested


def test_the_context_of_an_exception_is_not_looked_at():
    with pytest.raises(ValueError, match="second") as raised:
        raises_twice()
    assert user_traceback(contained(raised.value)).endswith("ValueError: second\n")


@pytest.mark.skipif(Group is None, reason="exception groups")
def test_a_group_has_the_messages_of_its_inner_exceptions():
    inner = Group("inner", [ValueError(str(i)) for i in range(9)])
    told = str(contained(Group("outer", [KeyboardInterrupt("stop"), inner])))
    assert told == (
        "outer (2 sub-exceptions); KeyboardInterrupt: stop; ValueError: 0; ValueError: 1; "
        "ValueError: 2; ValueError: 3; and more"
    )
    deep: BaseException = ValueError("deep")
    for _ in range(5000):
        deep = Group("group", [deep])
    assert str(contained(deep)).endswith("ValueError: deep")


def test_the_end_of_a_ray_worker_is_no_error_of_its_rows():
    """Pins what Ray raises in a worker on SIGTERM: a SystemExit with an attribute of its own."""
    from ray._raylet import raise_sys_exit_with_custom_error_message

    with pytest.raises(SystemExit) as raised:
        raise_sys_exit_with_custom_error_message("The process receives a SIGTERM.", exit_code=1)
    assert is_shutdown(raised.value)
    assert not is_shutdown(SystemExit(1))


def test_errors_of_rows_are_made_safe_one_by_one():
    error = contained(vd.RowErrors({0: NoText(), 1: ValueError("fine"), 2: "no exception"}, None))
    assert [str(inner) for inner in error.errors.values()] == [
        "<str() of the exception raised ValueError>",
        "fine",
        "no exception",
    ]


# In a run


def plain(batch):
    for name in batch["kind"].to_pylist():
        if name:
            raise EXCEPTIONS[name]()
    return {"y": [2 * i for i in batch["id"].to_pylist()]}


def generator(batch):
    yield pa.table({"id": batch["id"], "y": plain(batch)["y"]})


async def later(batch):
    await asyncio.sleep(0)
    return plain(batch)


async def in_a_task(batch):
    """Raised in a task of the user's own: asyncio ends its loop by some."""
    return await asyncio.create_task(later(batch))


class Column:
    def __init__(self, batch) -> None:
        self.batch = batch

    def __iter__(self):
        return iter(plain(self.batch)["y"])


def output(batch):
    return {"y": Column(batch)}


class Constructor:
    def __init__(self, name: str) -> None:
        raise EXCEPTIONS[name]()

    def __call__(self, batch):
        return plain(batch)


def pipeline(tmp_path: Path, fn, kinds=(), rows=0, **kwargs) -> vd.Pipeline:
    kinds = list(kinds)
    kinds += [None] * ROWS
    source = {"id": pa.array(range(len(kinds)), pa.int64()), "kind": pa.array(kinds, pa.string())}
    write_source(tmp_path / "source", source)
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "source")), id="id")
    given = {"schema": {"y": "BIGINT"}, "batch_size": 8, "version": "1", "concurrency": 1}
    options = {"on_error": "quarantine", "max_error_rate": 0.9, "max_retries": 0}
    docs.map_batches("double", fn, **{**given, **options, **kwargs})
    return docs


@pytest.mark.parametrize("timeout_s", [None, 60])
@pytest.mark.parametrize("fn", [plain, generator, output, later, in_a_task])
def test_each_poison_row_is_quarantined_alone(fn, timeout_s, tmp_path, local, materialize):
    kinds = list(EXCEPTIONS)
    docs = pipeline(tmp_path, fn, kinds, timeout_s=timeout_s)

    materialize(docs, local)

    check_poison(tmp_path, kinds)


def test_each_poison_row_is_quarantined_alone_on_ray(tmp_path, cluster, materialize):
    kinds = list(EXCEPTIONS)

    materialize(pipeline(tmp_path, plain, kinds), vd.RayCompute(cluster=cluster))

    check_poison(tmp_path, kinds)


def check_poison(tmp_path: Path, kinds: list[str]) -> None:
    ys = read_stage(tmp_path / "store", "docs", "double")["y"].to_pylist()
    assert ys == [2 * i for i in range(len(kinds), len(kinds) + ROWS)]
    rows = vd.quarantine("docs/double", store=str(tmp_path / "store")).to_pylist()
    found = {kinds[row["id"]]: row for row in rows}
    assert list(found) == kinds
    assert found["KeyboardInterrupt"]["message"] == "stop"
    assert found["CancelledError"]["error"] == "CancelledError"
    assert found["OnlyHere"]["message"] == "of the worker alone"
    assert len(found["Huge"]["message"]) == 4000
    if "BaseExceptionGroup" in found:
        assert (
            "ValueError: the first; KeyboardInterrupt: the second"
            in (found["BaseExceptionGroup"]["message"])
        )


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "NoText", "Surrogates", "CancelledError"])
def test_a_constructor_that_raises_it_fails_the_stage(name, tmp_path, local, materialize):
    docs = pipeline(tmp_path, Constructor, fn_constructor_kwargs={"name": name})

    told = failure(materialize(docs, local, raises=False))

    kind = "ValueError" if name == "Surrogates" else name
    assert f"Constructor could not be constructed in a worker: {kind}: " in told
    assert "raise EXCEPTIONS[name]()" in told


# File descriptors


def closes(batch):
    if BAD in batch["id"].to_pylist():
        os.closerange(3, 1024)
    return {"y": [2 * i for i in batch["id"].to_pylist()]}


def reuses(batch):
    """Has files of its own under the numbers that the worker's were closed at."""
    if BAD in batch["id"].to_pylist():
        os.closerange(3, 1024)
        for _ in range(64):
            os.open("/dev/null", os.O_RDWR)
    return {"y": [2 * i for i in batch["id"].to_pylist()]}


def leaks(batch):
    if BAD in batch["id"].to_pylist():
        builtins.kept = []
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        with contextlib.suppress(OSError):
            while True:
                builtins.kept.append(open("/dev/null"))  # noqa: SIM115
    return {"y": [2 * i for i in batch["id"].to_pylist()]}


@pytest.mark.parametrize("fn", [closes, reuses, leaks])
def test_code_that_closes_the_workers_files(fn, tmp_path, compute, materialize):
    docs = pipeline(tmp_path, fn)

    materialize(docs, compute)

    ys = read_stage(tmp_path / "store", "docs", "double")["y"].to_pylist()
    assert ys == [2 * i for i in range(ROWS) if i != BAD]
    rows = vd.quarantine("docs/double", store=str(tmp_path / "store")).to_pylist()
    assert [(row["id"], row["error"]) for row in rows] == [(BAD, "WorkerDied")]


def test_output_is_kept_although_its_stream_is_closed():
    stream = io.StringIO()
    tap = OutputTap(stream)
    stream.close()

    print("text \udcff", file=tap, flush=True)

    assert tap.drain() == "text \\udcff\n"


# Processes and tasks


def forks(batch):
    if BAD in batch["id"].to_pylist() and os.fork() == 0:
        raise ValueError("of the child")
    return {"y": [2 * i for i in batch["id"].to_pylist()]}


async def forks_later(batch):
    return forks(batch)


@pytest.mark.parametrize("fn", [forks, forks_later])
def test_a_forked_child_that_returns_is_ended(fn, tmp_path, local, materialize):
    materialize(pipeline(tmp_path, fn), local)

    ys = read_stage(tmp_path / "store", "docs", "double")["y"].to_pylist()
    assert ys == [2 * i for i in range(ROWS)]


async def cancels_itself(batch):
    if BAD in batch["id"].to_pylist():
        asyncio.current_task().cancel()
    return {"y": [2 * i for i in batch["id"].to_pylist()]}


async def cancels_all(batch):
    if BAD in batch["id"].to_pylist():
        for task in asyncio.all_tasks():
            task.cancel()
    await asyncio.sleep(0.01)
    return {"y": [2 * i for i in batch["id"].to_pylist()]}


@pytest.mark.parametrize("fn", [cancels_itself, cancels_all])
def test_a_row_that_cancels_tasks_is_quarantined_alone(fn, tmp_path, local, materialize):
    materialize(pipeline(tmp_path, fn, max_concurrency=4), local)

    ys = read_stage(tmp_path / "store", "docs", "double")["y"].to_pylist()
    assert ys == [2 * i for i in range(ROWS) if i != BAD]
    rows = vd.quarantine("docs/double", store=str(tmp_path / "store")).to_pylist()
    assert [(row["id"], row["error"]) for row in rows] == [(BAD, "CancelledError")]
