"""A row index that several processes need at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.row_records import records_schema, write_records

OPEN = """
import sys
from pathlib import Path
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.row_records import RecordedPart
from vane_dagster.worker import row_index
folder, records = Path(sys.argv[1]), sys.argv[2]
made = row_index._make
def noted(*args):
    (folder / "made").open("a").write("x")
    made(*args)
row_index._make = noted
part = RecordedPart(Location(str(folder)), "part", records)
(folder / "indexes").mkdir(exist_ok=True)
assert len(row_index.open_index([part], 0, folder / "indexes")) == 2
"""


def test_processes_that_need_an_index_at_once_make_one(tmp_path: Path):
    columns = {"key_high": [1, 3], "key_low": [2, 4], "id": ["a", "b"], "outcome": [0, 0]}
    columns |= {"epoch": [0, 0], "run_id": ["r"] * 2, "model": ["m"] * 2, "code": ["c"] * 2}
    table = pa.table({**columns, "at": [0, 0]}).cast(records_schema(pa.string()))
    records = write_records(Location(str(tmp_path)), "0" * 40, table)
    started = [
        subprocess.Popen([sys.executable, "-c", OPEN, str(tmp_path), records]) for _ in range(3)
    ]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    assert (tmp_path / "made").read_text() == "x"
