"""A small pipeline of every stage kind, of which a store and its keys are kept in the tests.

Whatever is edited here changes the keys that `test_key_versions.py` pins, and asks for a new store.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa

import vane_dagster as vd

PARTITIONS = ("a", "b")
WRITTEN_AT = 1_700_000_000
"""Unix time of the source's files, which is their version."""


class Scale:
    """A class whose identity is its `version=`."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        values = [n.as_py() for n in batch["n"]]
        if 3 in values:
            raise ValueError("three")
        return {"id": batch["id"], "scaled": [self.factor * n for n in values]}


def length(batch: pa.Table) -> dict[str, Any]:
    """A function whose identity is its code."""
    return {"id": batch["id"], "length": [len(text.as_py()) for text in batch["text"]]}


def words(batch: pa.Table) -> pa.Table:
    """Many rows of one."""
    rows = [
        (f"{id}/{n}", id.as_py(), word)
        for id, text in zip(batch["id"], batch["text"])
        for n, word in enumerate(text.as_py().split())
    ]
    ids, parents, found = zip(*rows)
    return pa.table({"word_id": ids, "id": parents, "word": found})


def set_times(folder: Path) -> None:
    """Sets the times of the source's files, which are their versions."""
    for file in sorted((folder / "source").rglob("*.parquet")):
        os.utime(file, (WRITTEN_AT, WRITTEN_AT))


def pipeline(folder: Path, base_url: str = "http://127.0.0.1:1/v1") -> vd.Pipeline:
    """The pipeline over the source in a folder; its targets are relative to the current folder.

    Args:
        folder: It holds the folder "source". It is in no key, as paths are relative to it.
        base_url: Of a server that speaks OpenAI's API.
    """
    options = {"path": str(folder), "target_protocol": "file"}
    found = vd.Pipeline(
        "frozen",
        source=vd.parquet("dir://source/{partition_key}", storage_options=options),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(list(PARTITIONS)),
    )
    clean = found.project("clean", {"text": "trim(text)", "n": "n"}, where="n >= 0")
    scaled = clean.map_batches(
        "scaled",
        Scale,
        schema={"scaled": "BIGINT"},
        columns=["n"],
        fn_constructor_kwargs={"factor": 3},
        version="1",
        on_error="quarantine",
        max_error_rate=0.5,
    )
    clean.map_batches("lengths", length, schema={"length": "BIGINT"}, columns=["text"])
    split = clean.map_batches(
        "words",
        words,
        schema={"word_id": "VARCHAR", "id": "BIGINT", "word": "VARCHAR"},
        columns=["text"],
        cardinality="one_to_many",
        id="word_id",
        parent_id="id",
        version="1",
    )
    asked: dict[str, Any] = {
        "provider": "openai",
        "provider_options": {"base_url": base_url, "api_key_env": "FROZEN_KEY"},
        "env_vars": ["FROZEN_KEY"],
    }
    answers = clean.prompt(
        "answers", "Say {text}", model="m", system="Be brief", sampling_params={"seed": 1}, **asked
    )
    clean.classify("kinds", "text", ["good", "bad"], model="m", on_error="null", **asked)
    vectors = clean.embed("vectors", "text", model="e", dimensions=4, **asked)
    found.join("pairs", clean, split, children="rows")
    found.join("unnamed", clean, split, children="list")
    listed = found.join(
        "lists",
        clean,
        split,
        how="left",
        children="list",
        columns={"words": ["word"]},
        checks=[vd.checks.NullRate(0.25)],
    )
    joined = found.join("joined", clean, answers, vectors, how="left")
    joined.write("files", "files/{partition_key}", checks=[vd.checks.Off("error_rate")])
    listed.write("table", "table", format="delta")
    scaled.write("merged", "merged/{partition_key}", target_file_bytes=1 << 20)
    return found
