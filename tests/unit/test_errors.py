"""Texts of errors."""

from __future__ import annotations

import pytest

from vane_dagster.errors import described


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
