"""Writes to the store in a process that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from support.manifests import manifest, part
from support.paths import TESTS
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.schema_pins import read_pin
from vane_dagster.storage.store import Store

KILLED = """
    import os, sys
    import pyarrow as pa
    from support.manifests import manifest, part
    from vane_dagster.storage.filesystem import Location
    from vane_dagster.storage.schema_pins import SchemaPin, keep_pin
    from vane_dagster.storage.store import Store
    store = Store(Location(sys.argv[1]))
    os.replace = os.link = lambda *paths: os._exit(9)
    {action}
"""


@pytest.mark.parametrize(
    "action",
    [
        "part(store.parts('docs', 's', 'p'))",
        "store.commit(manifest())",
        "keep_pin(store, 'docs', 's', '0', SchemaPin(pa.schema([]), 1, 'r', 1.0))",
    ],
)
def test_a_kill_between_write_and_rename_leaves_nothing(tmp_path, action):
    code = textwrap.dedent(KILLED).format(action=action)
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, env=environment, check=False).returncode == 9

    assert [path for path in tmp_path.rglob("*") if path.is_file()], "it was killed too early"
    store = Store(Location(str(tmp_path)))
    assert store.latest("docs", "s", ["p"]) == {}
    assert store.existing_parts(store.parts("docs", "s", "p")) == {}
    assert read_pin(store, "docs", "s", "0") is None
    info = part(store.parts("docs", "s", "p"))
    assert store.commit(manifest([info])).sequence == 1
