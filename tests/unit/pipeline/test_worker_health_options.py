"""Validation of the health check and lifecycle options of workers."""

from __future__ import annotations

import re

import pytest

import vane_dagster as vd
from support.unhealthy import Wrong, pipeline


def test_a_probe_that_wants_arguments(tmp_path):
    class Odd(Wrong):
        def check_health(self, deep):
            return deep

    with pytest.raises(vd.DefinitionError, match=r"check_health\(self, deep\) cannot be called as"):
        pipeline(tmp_path, Odd)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"startup_timeout_s": 0}, "startup_timeout_s is 0; expected seconds above 0"),
        ({"max_batches": 0}, "max_batches is 0; expected a whole number"),
        ({"max_rss": "2GB"}, "max_rss is '2GB'; expected a whole number"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(vd.DefinitionError, match=re.escape(f"vd.Workers: {message}")):
        vd.Workers(**arguments)
