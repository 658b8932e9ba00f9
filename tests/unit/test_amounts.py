"""Numbers as text."""

from __future__ import annotations

import pytest

from vane_dagster._texts import amount


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
