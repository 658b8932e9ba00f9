"""Rows of some kinds of sources, traced on the command line, which has no declaration of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.csv
import pytest
from click.testing import CliRunner
from deltalake import write_deltalake

import vane_dagster as vd
from support.in_process import compute
from vane_dagster.cli.main import main
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store

ROWS = pa.table(
    {
        "id": range(100, 150),
        "a": [f"a{i // 10}" for i in range(50)],
        "b": [i % 10 for i in range(50)],
        "text": [f"text {i}" for i in range(50)],
    }
)
TRACED = 33
"""The traced row's number: in the second of two files or commits, the 14th row."""
SPLIT = 20


def csv(folder: Path) -> Any:
    for name, rows in (("a", ROWS.slice(0, SPLIT)), ("b", ROWS.slice(SPLIT))):
        pyarrow.csv.write_csv(rows, folder / f"{name}.csv")
    return vd.csv(folder)


def delta(folder: Path) -> Any:
    for rows in (ROWS.slice(0, SPLIT), ROWS.slice(SPLIT)):
        write_deltalake(folder, rows, mode="append")
    return vd.delta(folder)


def lance_table(folder: Path) -> Any:
    for rows in (ROWS.slice(0, SPLIT), ROWS.slice(SPLIT)):
        lance.write_dataset(rows, folder, mode="append")
    return vd.lance(folder)


MAKE: dict[str, Callable[[Path], Any]] = {each.__name__: each for each in (csv, delta, lance_table)}
IDS = {"plain": "id", "numbered": vd.row_id("row"), "composite": {"ab": ["a", "b"]}}
CASES = {
    "csv": ("numbered", "composite"),
    "delta": ("plain",),
    "lance_table": ("numbered",),
}
"""The ids of the rows of some kinds of sources. How each kind finds a row is a unit test of it."""
ALL = [(kind, id) for kind, ids in CASES.items() for id in ids]
FILTERED = [(kind, id) for kind, id in ALL if id == "numbered" or kind != "csv"]
"""The others lead to the row if the stage's object is traced."""


def named(text: str) -> dict[str, str]:
    """A row's text; the rows that end in 2 fail."""
    if text.endswith("2"):
        raise ValueError("two")
    return {"same": text}


def declared(source: Any, kind: str, id: str) -> vd.Pipeline:
    pipeline = vd.Pipeline(f"{kind}_{id}", source=source, fragment_rows=10, id=IDS[id])
    pipeline.project("all", {"same": "text"})
    pipeline.project("some", {"same": "text"}, where="text NOT LIKE '%2'")
    pipeline.map("mapped", named, schema={"same": "VARCHAR"}, on_error="quarantine", reuse="rows")
    return pipeline


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of all pipelines."""
    root = tmp_path_factory.mktemp("sources")
    sources = {}
    for kind, make in MAKE.items():
        (root / kind).mkdir()
        sources[kind] = make(root / kind)
    for kind, id in ALL:
        compute(declared(sources[kind], kind, id), Store(Location(str(root / "store"))))
    return root / "store"


@pytest.mark.parametrize(
    ("stage", "kind", "id"),
    [
        (stage, *each)
        for stage, cases in (("all", ALL), ("some", FILTERED), ("mapped", ALL))
        for each in cases
    ],
)
def test_a_row_leads_to_its_file_and_number(traced, stage, kind, id):
    rows = vd.load(f"{kind}_{id}/{stage}", store=str(traced)).to_pylist()
    (row,) = (row for row in rows if row["same"] == f"text {TRACED}")
    key = next(value for name, value in row.items() if name != "same")
    command = ["trace", f"{kind}_{id}/{stage}", "--id", str(key), "--store", str(traced), "--json"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    source = json.loads(result.output)["steps"][0]
    assert source["notes"] == []
    assert source["row"] == TRACED - SPLIT
    assert text_at(source["url"], source["row"]) == f"text {TRACED}"


def text_at(url: str, row: int) -> str:
    """Return the text of a row, read from the file itself."""
    path = Path(url.removeprefix("file://"))
    if path.suffix == ".parquet":
        return pa.parquet.read_table(path)["text"][row].as_py()
    if path.suffix == ".lance":
        return lance.dataset(path.parents[1]).to_table()["text"][SPLIT + row].as_py()
    line = path.read_text().splitlines()[row + 1]
    return line.split(",")[-1].strip('"')


def test_where_only_the_declaration_can_read_the_file_the_rows_of_the_fragment_are_named(traced):
    command = ["trace", "csv_composite/some", "--id", "a3|3", "--store", str(traced), "--json"]
    source = json.loads(CliRunner().invoke(main, command).output)["steps"][0]
    assert source["row"] is None
    assert "which the store alone cannot read; trace with the stage's object" in source["notes"][0]
    assert "the row was one of" in source["notes"][1]
