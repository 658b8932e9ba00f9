"""Which processes a guard ends."""

from __future__ import annotations

import os

from vane_dagster.servers.guard import _processes


def test_a_mark_that_no_process_has_finds_none():
    assert _processes(2**56 + int.from_bytes(os.urandom(7), "big"), None) == set()
    assert _processes(2**56, 2**30) == set()  # no process has such an id
