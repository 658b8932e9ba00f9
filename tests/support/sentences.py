"""A pipeline that splits texts into rows."""

from __future__ import annotations

import pyarrow as pa

import vane_dagster as vd
from support.arguments import grouped
from support.data import write_source

TEXTS = ["a b c", "d", "e f", "", "g h i j", "k"]


def split(batch: pa.Table) -> pa.Table:
    rows = [
        (f"{id}/{n}", id, word)
        for id, text in zip(batch["id"].to_pylist(), batch["text"].to_pylist())
        for n, word in enumerate(text.split())
    ]
    ids, parents, words = zip(*rows) if rows else ((), (), ())
    return pa.table(
        {
            "word_id": pa.array(ids, pa.string()),
            "id": pa.array(parents, batch["id"].type),
            "word": pa.array(words, pa.string()),
        }
    )


SCHEMA = {"word_id": "VARCHAR", "id": "BIGINT", "word": "VARCHAR"}


def pipeline(tmp_path, **kwargs) -> vd.Pipeline:
    write_source(
        tmp_path / "source",
        {"id": pa.array(range(len(TEXTS)), pa.int64()), "text": TEXTS},
        row_group_size=3,
    )
    return vd.Pipeline(
        "docs", source=vd.parquet(str(tmp_path / "source")), id="id", fragment_rows=3, **kwargs
    )


def rows(table: pa.Table, *names: str) -> list[tuple]:
    return list(zip(*(table[name].to_pylist() for name in names)))


def words(docs: vd.Pipeline, **kwargs) -> vd.Stage:
    given = {"cardinality": vd.Children("word_id"), "schema": SCHEMA, **kwargs}
    return docs.map_batches("words", given.pop("fn", split), **grouped(given))


ASIDE = {"on_error": "quarantine", "max_error_rate": 1.0}
