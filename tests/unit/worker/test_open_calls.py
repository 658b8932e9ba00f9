"""What a worker says of the calls that it waits for."""

import pyarrow as pa

from vane_dagster.worker.open_calls import OpenCalls


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def ids(*values: object) -> pa.ChunkedArray:
    return pa.chunked_array([values])


def test_a_call_that_takes_long_is_described_when_its_time_has_doubled():
    clock = Clock()
    calls = OpenCalls(clock)
    said = {}
    with calls.one(ids("a", "b")):
        for clock.now in range(0, 300, 10):
            if text := calls.describe():
                said[clock.now] = text
    assert said == {
        60: "the call for the 2 rows from 'a' has run for 60 s",
        120: "the call for the 2 rows from 'a' has run for 120 s",
        240: "the call for the 2 rows from 'a' has run for 240 s",
    }
    assert calls.describe() == ""


def test_the_oldest_call_is_described_if_none_before_it_took_half_as_long():
    clock = Clock()
    calls = OpenCalls(clock)
    with calls.one(ids(1)):
        clock.now = 100
    with calls.one(ids(2)):
        clock.now = 200
        with calls.one(ids(3)):
            clock.now = 299
            assert calls.describe() == ""
            clock.now = 300
            assert calls.describe() == "the call for row 2 has run for 200 s"


def test_rows_that_are_called_again_precede():
    clock = Clock()
    calls = OpenCalls(clock)
    with calls.one(ids(1)):
        clock.now = 100
        calls.retried = {0: [ValueError("one")] * 3, 1: [ValueError("two")]}
        expected = "4 rows are being retried after errors, the last: ValueError: two"
        assert calls.describe() == expected
