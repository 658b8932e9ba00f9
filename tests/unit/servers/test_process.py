"""What a server process derives from texts, and from its interpreter."""

from __future__ import annotations

import os
import sys

from vane_dagster.servers import triton_runner
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


def test_triton_finds_the_shared_library_of_its_interpreter(monkeypatch, tmp_path):
    library = tmp_path / "lib" / "libpython{}.{}.so.1.0".format(*sys.version_info[:2])
    library.parent.mkdir()
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/cuda/lib")
    triton_runner._let_triton_find_python()
    assert os.environ["LD_LIBRARY_PATH"] == "/cuda/lib"
    library.touch()
    triton_runner._let_triton_find_python()
    assert os.environ["LD_LIBRARY_PATH"] == f"{library.parent}:/cuda/lib"
