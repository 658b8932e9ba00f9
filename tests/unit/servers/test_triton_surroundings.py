"""What a server of Triton finds around it: the interpreter's shared library, lost shared memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from vane_dagster.servers import triton_runner


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("before", ["", "/cuda/lib"])
def test_an_interpreters_own_library_comes_first(monkeypatch, tmp_path, before, has_library):
    library = tmp_path / "lib" / "libpython{}.{}.so.1.0".format(*sys.version_info[:2])
    library.parent.mkdir()
    if has_library:
        library.touch()
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", before)

    triton_runner._let_triton_find_python()

    own = str(library.parent) if has_library else ""
    assert os.environ["LD_LIBRARY_PATH"] == ":".join(path for path in (own, before) if path)


def test_shared_memory_of_killed_servers_alone_is_removed(tmp_path: Path):
    kept = {f"pytrtion{os.getpid()}-a-b", "pytrtion-x", "psm_1234"}
    for name in (*kept, f"pytrtion{2**22 + 1}-a-b"):  # above the largest process id
        (tmp_path / name).touch()

    triton_runner._remove_lost_shared_memory(str(tmp_path))

    assert {file.name for file in tmp_path.iterdir()} == kept
