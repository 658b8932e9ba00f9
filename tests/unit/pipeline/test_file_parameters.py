"""Parameters that get files: which column holds their paths."""

from __future__ import annotations

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.udf_calls import row_stage, run_stage

PATHS = pa.table({"id": [1, 2], "path": ["/a.txt", None], "scan": ["/b.pdf", "/c.pdf"]})


def name(file: vd.File | None) -> str:
    return "none" if file is None else file.name


def suffix(scan: vd.File, by: int = 1) -> str:
    return scan.suffix * by


def both(file: vd.File, scan: vd.File, path: str) -> str:
    return f"{file.name if file else None} {scan.name} {path}"


@pytest.mark.parametrize(
    ("fn", "columns", "expected"),
    [
        (name, None, ["a.txt", "none"]),  # `file` gets the path of the row
        (suffix, None, [".pdf", ".pdf"]),  # other parameters the column of their name
        (name, {"file": "scan"}, ["b.pdf", "c.pdf"]),
        (both, None, ["a.txt b.pdf /a.txt", "None c.pdf None"]),
    ],
)
def test_a_parameter_gets_a_file_of_its_column(fn, columns, expected):
    stage = row_stage("map", fn, columns=columns, schema={"x": "VARCHAR"})
    assert run_stage(stage, PATHS)["x"].to_pylist() == expected


def test_a_file_parameter_is_part_of_the_definition():
    def as_text(file: str) -> str:
        return file

    def as_file(file: vd.File) -> str:
        return file.name

    text = row_stage("map", as_text, columns={"file": "path"}, schema={"x": "VARCHAR"})
    opened = row_stage("map", as_file, columns={"file": "path"}, schema={"x": "VARCHAR"})
    assert text.spec.contract.keyed != opened.spec.contract.keyed
