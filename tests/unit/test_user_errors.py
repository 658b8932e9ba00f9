"""Exceptions that are hard to handle, made safe."""

from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.poison import (
    EXCEPTIONS,
)
from vane_dagster._user_errors import contained, hinted, is_shutdown
from vane_dagster.errors import CostlyError, described
from vane_dagster.retries import is_transient
from vane_dagster.worker.row_errors import user_frames, user_traceback

# The text of an exception


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_every_exception_is_made_safe(name):
    try:
        raise EXCEPTIONS[name]()
    except BaseException as raised:
        error = contained(raised)

    kind = "ValueError" if name in ("Surrogates", "Huge") else name
    assert isinstance(error, Exception)
    assert type(error).__name__ == kind
    assert len(str(error)) <= 20_000
    pa.array([str(error), repr(error), user_traceback(error)]).cast(pa.binary()).cast(pa.string())
    assert "test_user_errors.py" in user_traceback(error)
    assert not is_transient(error)


def test_a_variable_that_a_worker_lacks_is_named_with_the_fix(monkeypatch):
    monkeypatch.setenv("VANE_DAGSTER_WORKER", "1")
    other = KeyError("NOT_SET")
    assert hinted(other) is other
    with pytest.raises(KeyError) as caught:
        os.environ["NOT_SET"]
    error = hinted(contained(caught.value), ["text"])
    assert type(error).__name__ == "KeyError"
    assert str(error).startswith("'NOT_SET'. The environment variable is not set in the worker. ")
    assert "test_user_errors.py" in user_traceback(error)
    monkeypatch.delenv("VANE_DAGSTER_WORKER")
    assert hinted(caught.value) is caught.value


class Refused(CostlyError):
    used = MappingProxyType({"calls": 3})


@pytest.mark.parametrize("text", ["half a pair: \ud800", "x" * 30_000])
def test_what_an_error_cost_is_counted_although_it_is_replaced(text):
    error = contained(Refused(text))
    assert type(error) is not Refused
    assert type(error).__name__ == "Refused"
    assert isinstance(error, CostlyError)
    assert error.used == {"calls": 3}


def test_a_group_has_the_messages_of_its_inner_exceptions():
    inner = ExceptionGroup("inner", [ValueError(str(i)) for i in range(9)])
    message = str(contained(BaseExceptionGroup("outer", [KeyboardInterrupt("stop"), inner])))
    assert message == (
        "outer (2 sub-exceptions); KeyboardInterrupt: stop; ValueError: 0; ValueError: 1; "
        "ValueError: 2; ValueError: 3; ValueError: 4"
    )


def test_the_end_of_a_ray_worker_is_no_error_of_its_rows():
    """Pins what Ray raises in a worker on SIGTERM: a SystemExit with an attribute of its own."""
    from ray._raylet import raise_sys_exit_with_custom_error_message

    with pytest.raises(SystemExit) as raised:
        raise_sys_exit_with_custom_error_message("The process receives a SIGTERM.", exit_code=1)
    assert is_shutdown(raised.value)
    assert not is_shutdown(SystemExit(1))


# Hints

TABLE = pa.table({"id": [1], "text": ["a"]})
ARROW = 'for pandas data frames, declare batch_format="pandas"'


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: TABLE["txt"], "has the columns 'id', 'text'. Did you mean 'text'?"),
        (lambda: TABLE.to_pandas()["txt"], "has the columns 'id', 'text'. Did you mean 'text'?"),
        (lambda: TABLE.to_pandas()[["x"]], "The batch has the columns 'id', 'text'"),
        (lambda: TABLE["label"], 'only the columns that it names; name "label" in columns='),
        (lambda: TABLE.apply(len), ARROW),
        (lambda: TABLE["id"].astype("int8"), ARROW),
        (lambda: TABLE.to_batches()[0].groupby("id"), ARROW),
        (lambda: TABLE.__setitem__("n", 1), ARROW),
        (lambda: TABLE["id"] + 1, ARROW),
        (
            lambda: Path("weights.bin").read_text(),
            "Pass a file of the project as vd.local_file('weights.bin')",
        ),
    ],
)
def test_a_common_mistake_is_reported_with_what_to_write(call, text):
    with pytest.raises((KeyError, AttributeError, TypeError, OSError)) as raised:
        call()
    error = hinted(raised.value, TABLE.column_names, [*TABLE.column_names, "label"])
    assert str(error).startswith(f"{raised.value}. ")
    assert str(error).endswith(text)
    assert isinstance(error, type(raised.value))
    assert type(error).__name__ == type(raised.value).__name__
    assert contained(error) is error
    assert user_traceback(error).endswith(f"{type(error).__name__}: {error}\n")


@pytest.mark.parametrize(
    "error",
    [
        KeyError("text"), KeyError(), AttributeError("no"), TypeError("no"),
        FileNotFoundError(2, "No such file", "/weights.bin"), FileNotFoundError("no"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "no"),
    ],
)  # fmt: skip
def test_other_errors_have_no_hint(error):
    assert hinted(error, TABLE.column_names) is error
    assert hinted(error) is error, "code that gets no columns"
    assert contained(error) is error


def test_a_file_beside_a_module_that_was_sent_is_passed_as_an_argument(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    error = FileNotFoundError(2, "No such file", f"{tmp_path}/project/a.yaml")
    assert hinted(error) is error, "in the driver"
    monkeypatch.setenv("VANE_DAGSTER_WORKER", "1")
    assert "as vd.local_file(path)" in str(hinted(error))
    other = FileNotFoundError(2, "No such file", f"{tmp_path}.yaml")
    assert hinted(other) is other


# Frames


def test_frames_are_the_users_with_paths_below_the_folder_of_the_definitions(tmp_path):
    folder = tmp_path / "code" / ("0" * 64) / "project"
    neighbour = Path(vd.__file__).parents[1] / "vane_dagster_project" / "here.py"
    code = compile("def fail():\n    raise ValueError('x')\n", os.fspath(folder / "a.py"), "exec")
    names = {}
    exec(code, names)
    caller = compile("def call(fail):\n    fail()\n", os.fspath(neighbour), "exec")
    exec(caller, names)
    with pytest.raises(ValueError, match="x") as raised:
        names["call"](names["fail"])
    frames = user_frames(raised.value).splitlines()
    assert frames[0] == "Traceback (most recent call last):"
    assert frames[-2:] == [
        f'  File "{neighbour}", line 2, in call',
        '  File "project/a.py", line 2, in fail',
    ]


# Texts of errors


@pytest.mark.parametrize(
    ("error", "name", "expected"),
    [
        (ValueError("no header"), None, "ValueError: no header"),
        (EOFError(), None, "EOFError"),
        (EOFError(" \n"), None, "EOFError"),
        ("no header", "wave.Error", "wave.Error: no header"),
        ("", "wave.Error", "wave.Error"),
    ],
)
def test_an_error_without_a_message_is_its_class(error, name, expected):
    assert described(error, name) == expected
