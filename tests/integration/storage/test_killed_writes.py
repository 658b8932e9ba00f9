"""Writes to the store in processes of their own: one that is killed, and one without a driver."""

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


def test_a_driver_that_is_not_installed():
    code = """
        import sys
        from vane_dagster.storage.filesystem import Location
        sys.modules["gcsfs"] = sys.modules["adlfs"] = None
        for url in ("gs://lake/x", "abfs://lake/x", "nosuch://lake/x"):
            try:
                Location(url).names()
            except Exception as error:
                print(type(error).__name__, error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    gcs, azure, unknown = done.stdout.splitlines()
    assert gcs.startswith("StoreError 'gs://lake/x' has no file system")
    assert gcs.endswith("Install vane-dagster[gcs]")
    assert azure.endswith("Install vane-dagster[azure]")
    assert unknown.startswith("StoreError 'nosuch://lake/x'")
    assert "fsspec knows" in unknown
