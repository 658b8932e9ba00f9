"""A plan shows what was edited since the stored results were made."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import vane_dagster as vd
from support.data import write_source
from vane_dagster.orchestration.read import open_store
from vane_dagster.storage.definition_texts import differences
from vane_dagster.storage.gc import GcPolicy, collect

DAY = 86_400.0


def first(batch: Any, factor: int = 1, api_key: str = "") -> Any:
    return {"y": [x * factor for x in batch["x"].to_pylist()]}


def second(batch: Any, factor: int = 1, api_key: str = "") -> Any:
    return {"y": [x + factor for x in batch["x"].to_pylist()]}


def numbers(folder: Path, fn: Any, factor: int, cleaned: str = "x") -> vd.Pipeline:
    made = vd.Pipeline("numbers", source=vd.parquet(str(folder / "src")), id="id")
    clean = made.project("clean", {"id": "id", "x": cleaned})
    given = {"factor": factor, "api_key": "sk-not-for-eyes"}
    clean.map_batches("y", fn, schema={"y": "BIGINT"}, fn_kwargs=given)
    return made


def run(pipeline: vd.Pipeline, store: vd.FragmentStore) -> None:
    resources = {"compute": vd.LocalCompute(), "store": store}
    assert dg.materialize([pipeline.build_assets()], resources=resources).success


def edits(pipeline: vd.Pipeline, store: vd.FragmentStore) -> dict[str, str]:
    return {each.stage: "\n".join(each.edits) for each in pipeline.plan(store=store).stages}


def test_code_expressions_and_arguments_are_shown_as_differences(tmp_path: Path) -> None:
    write_source(tmp_path / "src", {"id": range(5), "x": range(5)})
    store = vd.FragmentStore(root=str(tmp_path / "store"))
    run(numbers(tmp_path, first, 1), store)
    edited = numbers(tmp_path, second, 2, "x * 2")

    shown = edits(edited, store)

    assert shown["clean"] == "column['x']:\n-x\n+x * 2"
    assert '-    return {"y": [x * factor for' in shown["y"]
    assert '+    return {"y": [x + factor for' in shown["y"]
    assert "fn_kwargs['factor']:\n-1\n+2" in shown["y"]
    assert "+    return" in str(edited.plan(store=store))
    texts = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("definitions/*"))
    assert b"x * factor" in texts
    assert b"sk-not-for-eyes" not in texts

    run(edited, store)
    assert edits(edited, store) == {"clean": "", "y": ""}
    assert "fn_kwargs" not in edits(numbers(tmp_path, first, 2, "x * 2"), store)["y"]

    # The texts of a definition are collected with its last manifest.
    opened = open_store(store, "test")
    texts_of_y = tmp_path / "store" / "numbers" / "y" / "definitions"
    assert len(list(texts_of_y.iterdir())) == 2
    list(collect(opened, GcPolicy(time.time() + 30 * DAY, 7 * DAY, DAY)))
    (left,) = texts_of_y.iterdir()
    assert "x + factor" in left.read_text()


def test_edits_are_those_since_the_results_that_would_be_replaced(tmp_path: Path) -> None:
    def daily(fn: Any) -> vd.Pipeline:
        made = vd.Pipeline(
            "daily",
            source=vd.parquet(str(tmp_path / "src" / "{partition_key}")),
            id="id",
            partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
        )
        made.map_batches("y", fn, schema={"y": "BIGINT"})
        return made

    for key in "ab":
        write_source(tmp_path / "src" / key, {"id": range(5), "x": range(5)})
    store = vd.FragmentStore(root=str(tmp_path / "store"))
    daily(first).run(store=store, compute=vd.LocalCompute())
    edited = daily(second)
    edited.run("a", store=store, compute=vd.LocalCompute())  # it has the latest results

    assert '+    return {"y": [x + factor for' in edits(edited, store)["y"]

    # Texts that are damaged are not shown.
    for path in (tmp_path / "store").rglob("definitions/*"):
        path.write_text("{")
    assert edits(edited, store)["y"] == ""


def test_a_preview_keeps_no_texts(tmp_path: Path) -> None:
    write_source(tmp_path / "src", {"id": range(5), "x": range(5)})
    store = vd.FragmentStore(root=str(tmp_path / "store"))
    previewed = vd.Pipeline("numbers", source=vd.parquet(str(tmp_path / "src")), id="id")
    previewed.map_batches("y", first, schema={"y": "BIGINT"})

    assert len(previewed["y"].preview(3, store=store, compute=vd.LocalCompute())) == 3
    assert not list((tmp_path / "store").rglob("definitions"))


def test_a_store_without_sources_keeps_no_code(tmp_path: Path) -> None:
    write_source(tmp_path / "src", {"id": range(5), "x": range(5)})
    store = vd.FragmentStore(root=str(tmp_path / "store"), keep_sources=False)
    run(numbers(tmp_path, first, 1), store)

    assert edits(numbers(tmp_path, second, 1), store) == {"clean": "", "y": ""}
    assert not list((tmp_path / "store").rglob("definitions"))


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        ({"model": "a"}, {"model": "b"}, ["model:", "-a", "+b"]),
        ({}, {"top_p": "1"}, ["top_p:", "+1"]),
        ({"top_p": "1"}, {}, ["top_p:", "-1"]),
        ({"code": "a\nb"}, {"code": "a\nb"}, []),
        (
            {"code": "a\nb"},
            {"code": "a\nc"},
            ["--- code of the stored results", "+++ code", "@@ -1,2 +1,2 @@", " a", "-b", "+c"],
        ),
    ],
)
def test_texts_differ_line_by_line(before: Any, now: Any, lines: list[str]) -> None:
    assert [*differences(before, now)] == lines
