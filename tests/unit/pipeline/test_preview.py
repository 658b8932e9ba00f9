"""How a preview is shown: values cut, failed rows in their places."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from vane_dagster.pipeline.preview import FailedRow, Preview, StageCost

ROWS = pa.table({"id": ["a", "c"], "text": ["x" * 300, "<b>"], "vector": [[0.5] * 9, [1.0]]})


def shown(**given: Any) -> Preview:
    failed = [FailedRow("b", "model", "ValueError: no"), FailedRow("z", "clean", "OSError: gone")]
    costs = [StageCost("model", 3, 1.5, 2.0, 1200, 0.25)]
    values = {"table": ROWS, "failed": failed, "costs": costs, "input_ids": ["a", "b", "c"]}
    return Preview(**{"stage": "docs/model", "id": "id", **values, **given})


def test_failed_rows_are_in_the_place_of_their_input():
    assert shown().cells() == [
        ["id", "text", "vector", "error"],
        ["a", "x" * 22 + "…" + "x" * 17, "[0.5, 0.5, 0.5, … 9 in all]", ""],
        ["b", "", "", "ValueError: no"],
        ["c", "<b>", "[1]", ""],
        ["z", "", "", "in clean: OSError: gone"],
    ]
    assert shown(failed=[]).cells()[0] == ["id", "text", "vector"]


def test_long_paths_keep_their_ends_and_long_errors_their_beginnings():
    paths = [f"s3://lake/pictures/2026/01/01/the-camera/{n}.jpg" for n in "ab"]
    failed = [FailedRow(paths[0], "model", "ValueError: no header in " + paths[0])]
    cells = shown(table=pa.table({"id": [paths[1]]}), failed=failed, input_ids=paths).cells()
    assert cells[1:] == [
        ["s3://lake/pictures/202…/the-camera/a.jpg", "ValueError: no header in s3://lake/pict…"],
        ["s3://lake/pictures/202…/the-camera/b.jpg", ""],
    ]


def test_it_is_text_html_and_plain_values():
    text = str(shown())
    assert text.splitlines()[-1] == (
        "model: 3 rows in 1.5 s, 2 rows/s of a worker; 2.0 s to load the model; 1,200 tokens; "
        "a price of 0.25"
    )
    assert repr(shown()) == text
    html = shown()._repr_html_()
    assert "&lt;b&gt;" in html
    assert "x" * 22 + "…" + "x" * 17 in html
    assert "in clean: OSError: gone" in html
    assert pa.table(shown()) == ROWS
    assert len(shown()) == 2


def test_nothing_but_failures_can_be_shown():
    found = shown(table=ROWS.slice(0, 0), input_ids=["b"], failed=[FailedRow("b", "model", "E: e")])
    assert found.cells() == [["id", "text", "vector", "error"], ["b", "", "", "E: e"]]
    assert "E: e" in found._repr_html_()
    empty = shown(table=ROWS.slice(0, 0), input_ids=[], failed=[])
    assert empty.cells() == [["id", "text", "vector"]]
