"""Records between drivers and workers."""

from __future__ import annotations

import pickle

import pytest

from vane_dagster.errors import (
    DamagedPartError,
    UdfError,
    VaneError,
)
from vane_dagster.worker.reports import ERRORS, Fault, Tally, WorkReport


@pytest.mark.parametrize("kind", ERRORS)
def test_a_fault_raises_the_error_of_its_kind(kind: str) -> None:
    arrived = pickle.loads(pickle.dumps(Fault(kind, "what happened", "Traceback: here")))
    error = arrived.error()
    assert type(error) is ERRORS[kind]
    assert str(error) == "what happened\n\nTraceback: here"


def test_an_error_of_a_class_that_the_driver_lacks_is_a_general_one() -> None:
    assert type(Fault("OurSchemaError", "x").error()) is VaneError


def test_a_damaged_part_keeps_its_name() -> None:
    error = Fault("DamagedPartError", "is gone", part="0-1.parquet").error()
    assert isinstance(error, DamagedPartError)
    assert error.part == "0-1.parquet"


def test_a_report_is_vain_where_no_row_came_through_user_code() -> None:
    assert WorkReport(fault=Fault("UdfError", "x")).all_rows_failed
    assert not WorkReport(fault=Fault("ComputeError", "x")).all_rows_failed
    assert WorkReport(tally=Tally(3, quarantined=1, nulled=2)).all_rows_failed
    assert not WorkReport(tally=Tally(3, quarantined=2)).all_rows_failed
    assert not WorkReport().all_rows_failed
    assert ERRORS["UdfError"] is UdfError
