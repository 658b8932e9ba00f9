"""Failing rows: set aside with what is known of them, and tried again alone."""

from __future__ import annotations

import os

import pyarrow as pa

import vane_dagster as vd
from support.bad_rows import BAD, double
from support.data import read_stage, write_source
from support.results import metadata

ROWS = 200


class Fixed:
    """Fails at some rows as long as a file is not there; tells which rows it was given."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, batch: pa.Table) -> pa.Table:
        with open(f"{self.folder}/seen", "a") as file:
            file.write("".join(f"{x}\n" for x in batch["x"].to_pylist()))
        return double(batch, () if os.path.exists(f"{self.folder}/fixed") else BAD)


def test_rows_at_fault_go_aside_and_are_tried_again_alone(tmp_path, local, materialize):
    given = {"folder": str(tmp_path)}
    ids = pa.array(range(ROWS), pa.int64())
    write_source(tmp_path / "source", {"id": ids, "x": ids})
    source = vd.parquet(str(tmp_path / "source"))
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=50)
    double = docs.map_batches(
        "double",
        Fixed,
        columns=["x"],
        fn_constructor_kwargs=given,
        schema={"y": "BIGINT"},
        batch_size=10,
        on_error=vd.Failures("quarantine", max_error_rate=0.1),
    )
    double.project("below", {"z": "y + 1"})
    store, seen = tmp_path / "store", tmp_path / "seen"

    result = materialize(docs, local)

    good = [i for i in range(ROWS) if i not in BAD]
    table = read_stage(store, "docs", "double")
    assert table.select(["id", "y"]).to_pydict() == {"id": good, "y": [2 * i for i in good]}
    assert read_stage(store, "docs", "below")["id"].to_pylist() == good
    aside = vd.quarantine("docs/double", store=str(store))
    assert aside["id"].to_pylist() == list(BAD)
    first = aside.slice(0, 1).to_pylist()[0]
    assert first["stage"] == "docs/double"
    assert (first["error"], first["message"]) == ("ValueError", "cannot double 3")
    assert "raise ValueError" in first["traceback"]
    assert (first["attempts"], first["run_id"]) == (1, result.run_id)
    assert first["model"] == "Fixed"
    assert first["worker"]
    assert "rows 0 to 50" in first["fragment"]
    assert metadata(result, "double")["rows_quarantined"] == len(BAD)
    manifest = vd.FragmentStore(root=str(store)).open().in_force("docs", "double", None)
    assert [part.quarantined for part in manifest.parts] == [1, 2, 0, 1]
    rate = next(check for check in manifest.checks if check.name == "rows")
    assert rate.passed
    assert rate.metadata["error_rate"] == len(BAD) / ROWS

    seen.write_text("")
    planned = {s.stage: s.rows for s in docs.plan(store=str(store), retry_quarantined=True).stages}
    assert planned["double"] == len(BAD)
    again = {"retry_quarantined": True}
    materialize(docs, local, config=again)  # in vain
    assert {int(x) for x in seen.read_text().split()} == set(BAD)
    assert vd.quarantine("docs/double", store=str(store)).num_rows == len(BAD)
    seen.write_text("")
    (tmp_path / "fixed").touch()
    result = materialize(docs, local, config=again)
    assert {int(x) for x in seen.read_text().split()} == set(BAD)
    assert metadata(result, "double")["fragments_computed"] == 3
    assert metadata(result, "double")["fragments_reused"] == 1
    assert metadata(result, "below")["fragments_reused"] == 1
    assert read_stage(store, "docs", "double")["y"].to_pylist() == [2 * i for i in range(ROWS)]
    assert read_stage(store, "docs", "below")["z"].to_pylist() == [2 * i + 1 for i in range(ROWS)]
    assert vd.quarantine("docs/double", store=str(store)).num_rows == 0
    seen.write_text("")
    result = materialize(docs, local, config=again)
    assert metadata(result, "double")["fragments_computed"] == 0
    assert not seen.read_text()
