"""Numbers, and equal errors of partitions, as text."""

from __future__ import annotations

import pytest

from vane_dagster._texts import EqualErrors, amount


def test_errors_that_differ_in_the_partition_and_in_numbers_are_one():
    errors = EqualErrors()
    keys = ["a", "tue", "wed", "thu"]
    new = [errors.add(k, f"'/in/{k}/f{n}', day={k}: row {n} of a file") for n, k in enumerate(keys)]
    assert new == [1, 0, 0, 0]
    digests = zip(keys, ["/9fe0", "/b07c55d", "/4d"])
    assert [errors.add(k, f"gone: {each}") for k, each in digests] == [2, 0, 0]
    assert [errors.add(key, "the column 'x' is not read") for key in keys] == [3, 0, 0, 0]
    assert errors.add("fri", "'/in/fri': no rows") == 4
    assert errors.add("fri", "stage 's', partition 'fri': no rows", "another stage") == 5
    assert errors.add(None, "no partitions") == 6
    assert errors.texts() == [
        "4 partitions (a, tue, wed and 1 more), the first: '/in/a/f0', day=a: row 0 of a file",
        "3 partitions (a, tue, wed), the first: gone: /9fe0",
        "4 partitions (a, tue, wed and 1 more), the first: the column 'x' is not read",
        "partition 'fri': '/in/fri': no rows",
        "stage 's', partition 'fri': no rows",
        "no partitions",
    ]


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0, 2, "0"),
        (2.4e-6, 2, "0.0000024"),
        (0.5, 2, "0.5"),
        (5.0, 2, "5"),
        (99.7, 2, "100"),
        (1234.5, 2, "1,234"),
        (2e6, 2, "2,000,000"),
        (12.25, 6, "12.25"),
        (2_000_000, 6, "2,000,000"),
        (1e-9, 6, "0.000000001"),
    ],
)
def test_amounts_have_no_exponent(value: float, digits: int, text: str) -> None:
    assert amount(value, digits) == text
