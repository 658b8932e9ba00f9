"""Parameters that get files: which column holds their paths."""

from __future__ import annotations

import pyarrow as pa

import vane_dagster as vd
from support.udf_calls import row_stage, run_stage

PATHS = pa.table({"id": [1, 2], "path": ["/a.txt", None], "scan": ["/b.pdf", "/c.pdf"]})


def name(file: vd.File | None) -> str:
    return "none" if file is None else file.name


def suffix(scan: vd.File, by: int = 1) -> str:
    return scan.suffix * by


def both(file: vd.File, scan: vd.File, path: str) -> str:
    return f"{file.name if file else None} {scan.name} {path}"


def test_the_parameter_file_gets_the_path_of_the_row():
    stage = row_stage("map", name, schema={"name": "VARCHAR"})
    assert run_stage(stage, PATHS)["name"].to_pylist() == ["a.txt", "none"]


def test_other_parameters_get_the_column_of_their_name():
    stage = row_stage("map", suffix, schema={"suffix": "VARCHAR"})
    assert run_stage(stage, PATHS)["suffix"].to_pylist() == [".pdf", ".pdf"]


def test_columns_name_another_column():
    stage = row_stage("map", name, columns={"file": "scan"}, schema={"name": "VARCHAR"})
    assert run_stage(stage, PATHS)["name"].to_pylist() == ["b.pdf", "c.pdf"]


def test_a_column_can_be_passed_as_file_and_as_text():
    stage = row_stage("map", both, schema={"both": "VARCHAR"})
    assert run_stage(stage, PATHS)["both"].to_pylist() == ["a.txt b.pdf /a.txt", "None c.pdf None"]


def test_a_file_parameter_is_part_of_the_definition():
    def as_text(file: str) -> str:
        return file

    def as_file(file: vd.File) -> str:
        return file.name

    text = row_stage("map", as_text, columns={"file": "path"}, schema={"x": "VARCHAR"})
    opened = row_stage("map", as_file, columns={"file": "path"}, schema={"x": "VARCHAR"})
    assert text.spec.contract.keyed != opened.spec.contract.keyed
