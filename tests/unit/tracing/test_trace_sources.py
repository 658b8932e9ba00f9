"""Rows of some kinds of sources, traced on the command line, which has no declaration of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from deltalake import write_deltalake

import vane_dagster as vd
from support.in_process import compute
from vane_dagster.cli.main import main
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store

ROWS = pa.table(
    {
        "a": [f"a{i // 10}" for i in range(50)],
        "b": [i % 10 for i in range(50)],
        "text": [f"text {i}" for i in range(50)],
    }
)
FILES = (ROWS.slice(0, 20), ROWS.slice(20))
IDS = {"csv": ["a", "b"], "delta": "text", "table": "text"}


def source(kind: str, folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    for number, rows in enumerate(FILES):
        if kind == "csv":
            pyarrow.csv.write_csv(rows, folder / f"{number}.csv")
        elif kind == "delta":
            write_deltalake(folder, rows, mode="append")
    return vd.table(ROWS) if kind == "table" else getattr(vd, kind)(folder)


def named(text: str) -> dict[str, str]:
    """A row's text; the rows that end in 2 fail."""
    if text.endswith("2"):
        raise ValueError("two")
    return {"same": text}


def declared(kind: str, source: Any) -> vd.Pipeline:
    pipeline = vd.Pipeline(kind, source=source, fragment_rows=10, id=IDS[kind])
    pipeline.project("all", {"same": "text"})
    pipeline.project("some", {"same": "text"}, where="text NOT LIKE '%2'")
    pipeline.map("mapped", named, schema={"same": "VARCHAR"}, on_error="quarantine", reuse="rows")
    return pipeline


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    for kind in IDS:
        pipeline = declared(kind, source(kind, root / kind))
        compute(pipeline, Store(StoragePath(str(root / "store"))))
    return root / "store"


def on_command(stage: str, id: str, store: Path, *options: str) -> Any:
    command = ["trace", stage, "--id", id, "--store", str(store), "--json", *options]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.mark.parametrize("stage", ["all", "some", "mapped"])
@pytest.mark.parametrize("kind", IDS)
def test_a_row_leads_to_its_file_and_number(traced, kind, stage):
    """Where the store alone cannot find it, the rows of its fragment are named."""
    id = "a3|3" if kind == "csv" else "text 33"
    step = on_command(f"{kind}/{stage}", id, traced)["steps"][0]
    if kind == "table":
        assert step["url"].startswith("table://")
        assert step["row"] == 33
        assert " bytes" not in str(vd.trace(f"{kind}/{stage}", id, store=traced))
        return
    path = Path(step["url"].removeprefix("file://"))
    if kind == "csv":
        assert path.name == "1.csv"
        assert step["row"] is None
        note, place = step["notes"]
        assert "which the store alone cannot read; trace with the stage's object" in note
        assert "the row was one of" in place
        pipeline = declared("csv", vd.csv(path.parent))
        assert vd.trace(pipeline[stage], "a3|3", store=traced).steps[0].row == 13
        return
    assert (step["row"], step["notes"]) == (13, [])
    assert pq.read_table(path)["text"][13].as_py() == "text 33"


def test_rows_in_the_store_are_read_whatever_the_pipeline_declares_now(traced):
    other = declared("table", vd.table({"a": ["x"], "b": [1], "text": ["y"]}))
    assert vd.trace(other["some"], "text 33", store=traced).steps[0].row == 33
    dropped = on_command("table", "text 2", traced, "--forward")
    assert dropped["steps"][0]["row"] == 2
    assert dropped["missing"]["table/some"] == "filtered by 'table/some'"
    assert dropped["missing"]["table/mapped"] == "quarantined by 'table/mapped': ValueError: two"
