"""Stages that call methods of one class under `vd.cls`, in runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.edits import Project
from support.results import metadata
from support.warm_workers import ForkedLocal, end_waiting

MODELS = """
import asyncio
import os
import sqlite3
import threading
import time
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

import vane_dagster as vd


@vd.cls(max_concurrency=1, name_override="whisper")
class Tokenizer:
    def __init__(self, separator):
        self.separator = separator

    def split(self, text):
        return text.split(self.separator)


@vd.cls(max_concurrency=1, max_retries=1)
class Transcriber:
    def __init__(self, log: str, model: str = "m"):
        with open(os.path.join(log, "loads"), "a") as opened:
            opened.write(f"{os.getpid()}\\n")
        self.model = model
        self.tokenizer = Tokenizer(" ")

    @vd.method(return_dtype="STRUCT(text VARCHAR, words INTEGER)")
    def transcribe(self, text: str):
        return {"text": self.model + ":" + text, "words": len(self.tokenizer.split(text))}

    @vd.method(return_dtype="STRUCT(first VARCHAR, second VARCHAR)", unnest=True)
    def parts(self, text: str):
        return {"first": text[:1], "second": text[1:2]}

    @vd.method.batch(return_dtype="BIGINT", batch_size=4)
    def lengths(self, text: pa.Array) -> pa.Array:
        assert len(text) <= 4
        return pc.utf8_length(text)

    @vd.method.batch(return_dtype="STRUCT(kind VARCHAR, size BIGINT)")
    async def described(self, text, n):
        assert self.tokenizer.separator == " "
        pairs = zip(text.to_pylist(), n.to_pylist())
        return [{"kind": type(t).__name__, "size": k} for t, k in pairs]

    @vd.method
    def upper(self, text: str) -> str:
        return text.upper()

    def pid(self, batch):
        return {"pid": [os.getpid()] * batch.num_rows}

    async def __call__(self, text: str) -> list[str]:
        return self.tokenizer.split(text)


@vd.cls
class Mixed:
    def __init__(self, log: str):
        with open(os.path.join(log, "loads"), "a") as opened:
            opened.write(f"{os.getpid()}\\n")
        self.database = sqlite3.connect(":memory:")
        self.running = {"sync": 0, "async": 0}

    def check_health(self):
        self.database.execute("SELECT 1")

    def doubled(self, n: int) -> int:
        self.running["sync"] += 1
        time.sleep(0.002)
        assert self.running == {"sync": 1, "async": 0}
        (found,) = self.database.execute("SELECT 2 * ?", (n,)).fetchone()
        self.running["sync"] -= 1
        return found

    def negated(self, n: int) -> int:
        return self.doubled(n) // -2

    async def beside(self, n: int) -> int:
        self.running["async"] += 1
        await asyncio.sleep(0.002)
        assert self.running["sync"] == 0
        found = self.running["async"]
        await asyncio.sleep(0.002)
        self.running["async"] -= 1
        return found


PIPELINE = vd.Pipeline("other", source=vd.parquet("/nowhere"), id="id")
PIPELINE.map("upper", Transcriber(".").upper, columns={"text": "text"})
"""
TEXTS = [f"some text {n}" for n in range(10)]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    made = Project(tmp_path / "models")
    monkeypatch.syspath_prepend(str(made.root))
    made.write(models=MODELS)
    write_source(tmp_path / "src", {"id": range(10), "n": range(10), "text": TEXTS})
    yield made
    made.forget()
    end_waiting()


def loads(tmp_path: Path) -> list[int]:
    file = tmp_path / "loads"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_methods_of_one_class_share_its_workers(tmp_path, project, materialize):
    """Those that are async have workers of their own; so has each other class."""
    (tmp_path / "mixed").mkdir()
    names = ("transcribe", "parts", "lengths", "upper")
    mixed_names = ("doubled", "beside", "negated")

    def declared() -> vd.Pipeline:
        docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=2)
        transcriber = project.load("Transcriber", "models")(str(tmp_path), model="m")
        models = sys.modules["models"]
        for name in names:
            docs.map(name, getattr(transcriber, name))
        docs.map("described", transcriber.described, include_columns=["n"])
        docs.map_batches("pid", transcriber.pid, schema={"pid": "BIGINT"})
        docs.map("words", transcriber)
        mixed = models.Mixed(str(tmp_path / "mixed"))
        for name in mixed_names:
            docs.map(name, getattr(mixed, name))
        return docs

    compute = ForkedLocal(num_cpus=2)  # models stay warm
    result = materialize(declared(), compute)

    def rows(stage: str) -> list[dict[str, Any]]:
        table = read_stage(tmp_path / "store", "docs", stage).sort_by("id")
        return table.to_pylist()

    def values(stage: str) -> list[Any]:
        return [row[stage] for row in rows(stage)]

    assert values("transcribe") == [{"text": f"m:{text}", "words": 3} for text in TEXTS]
    assert rows("parts")[0] == {"id": 0, "first": "s", "second": "o"}
    assert values("lengths") == [len(text) for text in TEXTS]
    assert rows("described")[3] == {"id": 3, "n": 3, "described": {"kind": "str", "size": 3}}
    assert values("upper") == [text.upper() for text in TEXTS]
    assert values("words")[1] == ["some", "text", "1"]
    assert values("doubled") == [2 * n for n in range(10)]
    assert values("negated") == [-n for n in range(10)]
    assert max(values("beside")) > 1, "calls of async methods are in flight at the same time"
    (pid,) = set(values("pid"))
    assert len(loads(tmp_path)) == 2, "one for the synchronous methods, one for the async ones"
    assert pid in loads(tmp_path)
    assert pid != os.getpid()
    assert len(loads(tmp_path / "mixed")) == 2
    own = (*names, "described", "pid", "words")
    for stages in (own, mixed_names):
        assert sum(metadata(result, stage)["model_loads"] for stage in stages) == 2

    project.edit("models.py", 'self.model + ":"', 'self.model + "-"')
    project.edit("models.py", "batch_size=4", "batch_size=8")
    project.edit("models.py", "assert len(text) <= 4", "assert len(text) <= 8")
    materialize(declared(), compute)
    assert rows("transcribe")[0]["transcribe"]["text"] == "m-some text 0"
    assert len(loads(tmp_path)) == 4, "an edit of the class loads its model again"

    project.edit("models.py", "max_concurrency=1, max_retries=1", "max_retries=2, gpus=0")
    result = materialize(declared(), compute)
    assert metadata(result, "lengths")["fragments_computed"] == 0
