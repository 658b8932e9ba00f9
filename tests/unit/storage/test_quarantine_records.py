"""Records of quarantined rows."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import Manifest, PartInfo
from vane_dagster.storage.quarantine import fault_schema, first_faults, write_faults

SCHEMA = pa.schema([("id", pa.string())])


def faults(**messages: str) -> pa.Table:
    common = {"stage": "s", "fragment": "f", "traceback": "", "attempts": 1, "run_id": "r"}
    common |= {"model": "m", "worker": "w", "at": datetime.now(UTC), "error": "EOFError"}
    records = [{"id": id, "message": text, **common} for id, text in messages.items()]
    return pa.Table.from_pylist(records, schema=fault_schema(pa.string()))


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 9])
def test_first_faults_of_several_parts(tmp_path, limit):
    folder = Location(str(tmp_path))
    names = [
        write_faults(folder, "one", faults(a="", b="two\nlines")),
        "",
        write_faults(folder, "two", faults(c="x" * 900)),
    ]
    parts = [PartInfo(str(n), "d", 0, 1, faults=name) for n, name in enumerate(names)]
    manifest = Manifest(
        "p", "s", None, 0, "", "", SCHEMA, (), parts, (), {}, "r", 0.0, keys=("id",)
    )
    found = first_faults(folder, manifest, limit)
    expected = ["id 'a': EOFError", "id 'b': EOFError: two lines", f"id 'c': EOFError: {'x' * 190}"]
    assert list(found) == expected[:limit]
