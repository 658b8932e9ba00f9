"""Row indexes that several processes of a node build."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.row_records import RecordedPart, records_schema, write_records


def recorded(folder: Path) -> RecordedPart:
    schema = records_schema(pa.int64())
    values = [1, 1, 1, 0, 5, None, None, None, None]
    arrays = [pa.array([value], field.type) for value, field in zip(values, schema)]
    location = Location(str(folder))
    table = pa.Table.from_arrays(arrays, schema=schema)
    return RecordedPart(location, "", write_records(location, "a", table))


BUILDER = """
import os, signal, sys
from pathlib import Path
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.row_records import RecordedPart
from vane_dagster.worker import recorded_rows

folder, records, mode = sys.argv[1:]
read = recorded_rows.read_part

def counted(*given):
    with open(Path(folder, "reads"), "a") as file:
        file.write("x")
    return read(*given)

def killed(*given):
    os.kill(os.getpid(), signal.SIGKILL)

recorded_rows.read_part = counted
if mode == "killed":
    recorded_rows.write_table = killed
print(len(recorded_rows.open_index([RecordedPart(Location(folder), "", records)], 1, Path(folder))))
"""


def builder(folder: Path, part: RecordedPart, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(folder), part.records, mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_one_process_builds_after_a_killed_one_and_others_wait(tmp_path):
    part = recorded(tmp_path)
    with builder(tmp_path, part, "killed") as killed:
        assert killed.wait() == -signal.SIGKILL
    assert len([*tmp_path.glob(".partial/*")]) == 1
    both = [builder(tmp_path, part, "whole") for _ in range(2)]
    assert [one.communicate()[0].strip() for one in both] == ["1", "1"]
    assert (tmp_path / "reads").read_text() == "xx"
    assert [*tmp_path.glob(".partial/*")] == []
