"""What a server process derives from texts."""

from __future__ import annotations

from vane_dagster.servers.launch import flags
from vane_dagster.servers.process import _filled


def test_flags_are_known_by_their_names():
    command = ("serve", "--api-key", "one", "--hf-token=two", "-q", "--model", "m")
    named = flags(command)
    assert {"api-key": "one"} in named
    assert {"hf-token": "two"} in named
    assert {"model": "m"} in named


def test_placeholders_are_replaced_literally():
    values = {"port": "8000", "host": "::1"}
    assert _filled('{"a": {port}, "{b}": "{host}:{port}"}', values) == (
        '{"a": 8000, "{b}": "::1:8000"}'
    )
