"""Many small files in few fragments: one that is added recomputes its own group alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import metadata
from vane_dagster.sources import FragmentRule

FILES, ROWS = 120, 5
FRAGMENT_ROWS = 150


def double(batch: pa.Table) -> dict[str, Any]:
    return {"double": [2 * n for n in batch["n"].to_pylist()]}


def write(folder: Path, name: str, first: int) -> Path:
    ids = range(first, first + ROWS)
    return write_source(folder, pa.table({"id": ids, "n": ids}), f"{name}.parquet")


def groups(folder: Path) -> set[str]:
    source = vd.parquet(str(folder), small_files="group")
    files = source.required(source.list_files([None], "here")[None], None, "here")
    return {f.identity for f in source.split(files, FragmentRule(FRAGMENT_ROWS), "here").fragments}


def test_an_added_file_recomputes_one_fragment(tmp_path, local, materialize):
    src = tmp_path / "src"
    for n in range(FILES):
        write(src, f"{n:03d}", n * ROWS)
    docs = vd.Pipeline(
        "docs",
        source=vd.parquet(str(src), small_files="group"),
        id="id",
        fragment_rows=FRAGMENT_ROWS,
    )
    kept = docs.project("kept", ["n"], where="n <> 7")
    kept.map_batches("doubled", double, schema={"double": "BIGINT"})
    fragments = groups(src)
    assert len(fragments) < FILES / 4

    result = materialize(docs, local)
    assert metadata(result, "doubled")["fragments_computed"] == len(fragments)
    rows = read_stage(tmp_path / "store", "docs", "doubled")
    expected = [n for n in range(FILES * ROWS) if n != 7]
    assert sorted(rows["id"].to_pylist()) == expected
    assert rows["double"].to_pylist() == [2 * n for n in rows["id"].to_pylist()]

    # Most names change one group; where it is full or a cut, the next ones of the segment change.
    for n in range(FILES):
        added = write(src, f"{n:03d}x", FILES * ROWS)
        if len(groups(src) - fragments) == 1:
            break
        added.unlink()
    assert len(groups(src) - fragments) == 1
    result = materialize(docs, local)
    assert metadata(result, "doubled")["fragments_computed"] == 1
    assert metadata(result, "kept")["fragments_computed"] == 1

    store = str(tmp_path / "store")
    for id, file in ((FILES * ROWS + 1, added.name), (503, "100.parquet"), (0, "000.parquet")):
        step = vd.trace("docs/doubled", id, store=store).steps[0]
        assert (step.url, step.row) == (f"file://{src}/{file}", id % ROWS)
    forward = vd.trace("docs/source", 503, forward=True, store=store)
    assert forward.steps[0].url == f"file://{src}/100.parquet"
    assert [step.stage for step in forward.steps] == ["docs/source", "docs/kept", "docs/doubled"]
    filtered = vd.trace("docs/source", 7, forward=True, store=store)
    assert (filtered.steps[0].url, filtered.steps[0].row) == (f"file://{src}/001.parquet", 2)
    assert "filtered" in filtered.missing["docs/kept"]

    write(src, "100", 10_000)
    (step, *_) = vd.trace("docs/doubled", 502, store=store).steps
    assert (step.url, step.row) == (f"file://{src}/100.parquet", 2), "in the version that was read"
    assert any("the file was changed since" in note for note in step.notes)
