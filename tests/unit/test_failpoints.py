"""Faults as they are declared, and what fires them."""

from __future__ import annotations

import asyncio
import os

import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster import _failpoints, testing
from vane_dagster.errors import DefinitionError
from vane_dagster.storage.filesystem import StoragePath


def fire(ids: list[int]) -> None:
    asyncio.run(_failpoints.at_call("docs/made", pa.array(ids), asyncio.sleep))


def test_calls_with_some_ids_are_counted_apart():
    with testing.faults(testing.CallFault("made", ids=[1], calls=2)) as injected:
        fire([1])
        fire([2])
        with pytest.raises(_failpoints._error_class("InjectedError")):
            fire([2, 1])
    assert injected.fired == (1,)


def test_a_plan_that_is_gone_does_nothing(tmp_path, monkeypatch):
    with testing.faults(testing.CallFault("made"), testing.StorageFault("*")) as injected:
        place = os.environ[_failpoints.VARIABLE]
        with pytest.raises(_failpoints._error_class("InjectedError")):
            fire([1])
    assert _failpoints.VARIABLE not in os.environ
    assert not os.path.exists(place)
    assert injected.fired == (1, 0)

    monkeypatch.setenv(_failpoints.VARIABLE, place)  # as in a worker of a killed run
    fire([1])
    _failpoints.at_load("Doubler")
    StoragePath(str(tmp_path)).write("f", b"written")
    assert injected.fired == (1, 0)


# Storage


def test_each_operation_on_storage(tmp_path):
    folder = StoragePath(str(tmp_path / "deep"))
    folder.write("f", b"1")
    with testing.faults(
        testing.StorageFault("*/f", "denied", "read"),
        testing.StorageFault("*/f", "no_space", times=1),
        testing.StorageFault("*/f", "denied", "delete"),
        testing.StorageFault("*/deep", "disconnect", "list", times=2),
        testing.StorageFault(f"file://{tmp_path}/deep/g", "disconnect", calls=1),
    ) as injected:
        with pytest.raises(
            vd.errors.StoreError, match=r"cannot be written: .*No space left on device"
        ):
            folder.write("f", b"2")
        folder.write("f", b"3")
        with pytest.raises(vd.errors.StoreError, match=r"cannot be read: .*Permission denied"):
            folder.read("f")
        with pytest.raises(
            vd.errors.StoreError, match=r"cannot be deleted from: .*Permission denied"
        ):
            folder.delete(["f"])
        folder.move("f", folder, "g")
        assert list(folder.names()) == ["g"]
        # What does not pass is not tried again; what passes is.
        assert injected.fired == (1, 1, 1, 2, 1)
    assert folder.read("g") == b"3"


# Declarations


CALL, LOAD, STORAGE = testing.CallFault, testing.LoadFault, testing.StorageFault


@pytest.mark.parametrize(
    ("kind", "given", "named", "message"),
    [
        (CALL, [""], {}, "stage is ''; expected a text"),
        (CALL, ["made", "explode"], {}, "does is 'explode'; expected one of 'raise', "),
        (CALL, ["made"], {"calls": [1, "2"]}, "calls is '2'; expected a whole"),
        (CALL, ["made"], {"times": 0}, "times is 0; expected a whole"),
        (CALL, ["made", "kill", 1], {"error": "ValueError"}, "for does='raise', not"),
        (LOAD, ["Model", "no_space"], {}, "does is 'no_space'; expected one of 'raise', "),
        (STORAGE, ["*", "hang"], {}, "does is 'hang'; expected one of 'no_space', "),
        (STORAGE, ["*", "denied", "move"], {}, "operation is 'move'; expected one of"),
        (STORAGE, ["*", "denied"], {"message": 5}, "message is 5; expected"),
    ],
)
def test_faults_that_are_declared_wrongly(kind, given, named, message):
    with pytest.raises(DefinitionError) as raised:
        kind(*given, **named)
    assert message in str(raised.value)


def test_blocks_that_are_declared_wrongly():
    fault = testing.CallFault("made", ids="seven")
    twice = pytest.raises(DefinitionError, match="give all in one block")
    with testing.faults(fault), twice, testing.faults(fault):
        pass
    assert _failpoints.VARIABLE not in os.environ


def test_equal_faults_are_told_apart_and_ids_are_compared_as_texts():
    fault = testing.CallFault("made", ids=(5, "b"), times=1)
    assert fault == testing.CallFault("made", ids=["5", "b"], times=1)
    assert hash(fault) == hash(testing.CallFault("made", ids=[5, "b"], times=1))
    with testing.faults(fault, fault) as injected:
        for ids in (["a"], ["b"], [5], [6]):
            with_error = pytest.raises(Exception, match=r"injected by vane_dagster\.testing")
            if set(ids) & {"b", 5}:
                with with_error:
                    fire(ids)
            else:
                fire(ids)
    assert injected.fired == (1, 1)
