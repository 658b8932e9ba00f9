"""A source in the user's own module, of a format that the package does not know."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.json

import vane_dagster as vd
from support.data import read_stage
from support.results import metadata
from vane_dagster.sources import (
    FileRecord,
    FileSource,
    FragmentRecord,
    FragmentRule,
    SourceTable,
    fragment_record,
)
from vane_dagster.storage.filesystem import Location

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])


@dataclass(frozen=True)
class JsonLines(FileSource):
    """Newline-delimited JSON; all files of a partition are one fragment."""

    kind: ClassVar[str] = "jsonl"
    suffix: ClassVar[str] = ".jsonl"
    upper: bool = False

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        spans = [(file, 0, self._load(file.url).num_rows) for file in files]
        return SourceTable(SCHEMA, (fragment_record(spans, sum(f.size for f in files)),))

    def read(self, fragment: FragmentRecord, schema: pa.Schema, location: str) -> pa.Table:
        tables = [self._load(s.url).slice(s.start, s.stop - s.start) for s in fragment.spans]
        table = pa.concat_tables(tables)
        if self.upper:
            texts = pa.array([text.upper() for text in table["text"].to_pylist()])
            table = table.set_column(1, "text", texts)
        return table.select(schema.names)

    def _load(self, url: str) -> pa.Table:
        place = Location(url, self.options_for(url))
        data = place.fs.cat_file(place.path)
        options = pa.json.ParseOptions(explicit_schema=SCHEMA)
        return pa.json.read_json(io.BytesIO(data), parse_options=options)


def write(file: Path, first: int, rows: int) -> None:
    file.parent.mkdir(exist_ok=True)
    lines = [json.dumps({"id": n, "text": f"t{n}"}) for n in range(first, first + rows)]
    file.write_text("\n".join(lines))


def length(batch: pa.Table) -> dict[str, Any]:
    return {"length": [len(text) for text in batch["text"].to_pylist()]}


def docs(source: JsonLines) -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=source, id="id")
    shouted = docs.project("kept", {"text": "text || '!'"}, where="id <> 2")
    shouted.map_batches("sized", length, schema={"length": "BIGINT"})
    return docs


def test_a_source_in_a_module_of_the_user(tmp_path, compute, materialize):
    write(tmp_path / "src" / "a.jsonl", 0, 3)
    write(tmp_path / "src" / "b.jsonl", 10, 2)
    source = JsonLines(str(tmp_path / "src"))
    result = materialize(docs(source), compute)
    assert metadata(result, "kept")["fragments_computed"] == 1
    kept = read_stage(tmp_path / "store", "docs", "kept")
    assert kept.to_pydict() == {"id": [0, 1, 10, 11], "text": ["t0!", "t1!", "t10!", "t11!"]}

    again = materialize(docs(source), compute)
    assert metadata(again, "kept").get("fragments_computed", 0) == 0
    changed = docs(replace(source, upper=True))
    assert metadata(materialize(changed, compute), "kept")["fragments_computed"] == 1
    kept = read_stage(tmp_path / "store", "docs", "kept")
    assert kept["text"].to_pylist() == ["T0!", "T1!", "T10!", "T11!"]

    store = str(tmp_path / "store")
    step = vd.trace(changed["sized"], 11, store=store).steps[0]
    assert (step.url, step.row) == (f"file://{tmp_path}/src/b.jsonl", 1)
    step = vd.trace("docs/sized", 11, store=store).steps[0]
    assert step.row is None
    assert any("jsonl" in note and "stage's object" in note for note in step.notes)
