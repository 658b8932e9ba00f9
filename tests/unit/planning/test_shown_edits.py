"""A plan shows what was edited since the stored results were made."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support.data import partitioned, write_source
from support.in_process import compute
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.store import Store

DAY = 86_400.0
KEYS = ["a", "b"]


def first(batch: Any, factor: int = 1, api_key: str = "") -> Any:
    return {"y": [x * factor for x in batch["x"].to_pylist()]}


def second(batch: Any, factor: int = 1, api_key: str = "") -> Any:
    return {"y": [x + factor for x in batch["x"].to_pylist()]}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    for key in KEYS:
        write_source(tmp_path / "src" / key, {"id": range(5), "x": range(5)})
    return Store(StoragePath(str(tmp_path / "store")))


def numbers(folder: Path, fn: Any, factor: int, cleaned: str = "x") -> vd.Pipeline:
    made = partitioned(f"{folder}/src", KEYS, "numbers")
    clean = made.project("clean", {"id": "id", "x": cleaned})
    given = {"factor": factor, "api_key": "sk-not-for-eyes"}
    clean.map_batches("y", fn, schema={"y": "BIGINT"}, fn_kwargs=given)
    return made


def edits(pipeline: vd.Pipeline, store: Store) -> dict[str, str]:
    found = pipeline.plan(store=vd.FragmentStore(root=store.root.path))
    return {each.stage: "\n".join(each.edits) for each in found.stages}


def test_code_expressions_and_arguments_are_shown_as_differences(tmp_path, store):
    compute(numbers(tmp_path, first, 1), store, KEYS)
    edited = numbers(tmp_path, second, 2, "x * 2")
    shown = edits(edited, store)
    assert shown["clean"].endswith("+++ column['x']\n@@ -1 +1 @@\n-x\n+x * 2")
    assert '-    return {"y": [x * factor for' in shown["y"]
    assert '+    return {"y": [x + factor for' in shown["y"]
    assert "+++ fn_kwargs['factor']\n@@ -1 +1 @@\n-1\n+2" in shown["y"]
    texts = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("definitions/*"))
    assert b"x * factor" in texts
    assert b"sk-not-for-eyes" not in texts

    # Those since the results that would be replaced: of "b", although "a" has the latest ones.
    compute(edited, store, ["a"])
    assert edits(edited, store) == shown
    compute(edited, store, ["b"])
    assert edits(edited, store) == {"clean": "", "y": ""}

    # The texts of a definition are collected with its last manifest.
    texts_of_y = tmp_path / "store" / "numbers" / "y" / "definitions"
    assert len(list(texts_of_y.iterdir())) == 2
    list(collect(store, GcPolicy(time.time() + 30 * DAY, 7 * DAY, DAY)))
    (left,) = texts_of_y.iterdir()
    assert "x + factor" in left.read_text()
    left.write_text("{")
    assert edits(numbers(tmp_path, first, 2), store)["y"] == "", "damaged texts are not shown"


def test_a_store_without_sources_keeps_no_code(tmp_path, store):
    compute(numbers(tmp_path, first, 1), Store(store.root, keeps_code=False), ["a"])
    assert edits(numbers(tmp_path, second, 1), store) == {"clean": "", "y": ""}
    assert not list((tmp_path / "store").rglob("definitions"))
