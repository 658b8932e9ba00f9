"""Exceptions that are hard to handle, made safe."""

from __future__ import annotations

import io
from types import MappingProxyType

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.poison import (
    EXCEPTIONS,
    Group,
    Liar,
    NoText,
)
from vane_dagster._user_errors import contained, is_shutdown
from vane_dagster.errors import CostlyError
from vane_dagster.storage.transient_errors import is_transient
from vane_dagster.worker.output import OutputTap
from vane_dagster.worker.row_errors import user_traceback

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
    assert "test_user_errors.py" in user_traceback(error)
    assert is_transient(error) == (name == "Liar")


def test_an_exception_that_behaves_stays_as_it_is():
    error = ConnectionError("reset")
    assert contained(error) is error


class Refused(CostlyError):
    used = MappingProxyType({"calls": 3})


@pytest.mark.parametrize("text", ["half a pair: \ud800", "x" * 30_000, "a\0b"])
def test_what_an_error_cost_is_counted_although_it_is_replaced(text):
    error = contained(Refused(text))
    assert type(error) is not Refused
    assert type(error).__name__ == "Refused"
    assert isinstance(error, CostlyError)
    assert error.used == {"calls": 3}


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
    message = str(contained(Group("outer", [KeyboardInterrupt("stop"), inner])))
    assert message == (
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
    error = contained(
        vd.RowErrors({0: NoText(), 1: ValueError("fine"), 2: "no exception"}, None, used={"n": 1})
    )
    assert [str(inner) for inner in error.errors.values()] == [
        "<str() of the exception raised ValueError>",
        "fine",
        "no exception",
    ]
    assert isinstance(error, vd.RowErrors)
    assert error.used == {"n": 1}


def test_output_is_kept_although_its_stream_is_closed():
    stream = io.StringIO()
    tap = OutputTap(stream)
    stream.close()

    print("text \udcff", file=tap, flush=True)

    assert tap.drain() == "text \\udcff\n"
