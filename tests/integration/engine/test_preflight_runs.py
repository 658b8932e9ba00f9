"""Preflight validation reports all problems in one error, before anything is leased."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ray

import vane_dagster as vd
from support.arguments import grouped
from support.data import write_source
from support.results import failure
from vane_dagster.compute.local_head import LocalHead

ROWS = {"id": [1, 2, 3], "n": [10, 20, 30]}


class Model:
    """Leaves a file behind when it is constructed, and gives its batch back."""

    def __init__(self, trace: str, held: Any = None) -> None:
        Path(trace).touch()

    def __call__(self, batch):
        return {"n": batch["n"]}


def locked() -> Any:
    """A function that cannot travel."""
    lock = threading.Lock()

    def call(batch):
        with lock:
            return {"n": batch["n"]}

    return call


def make(tmp_path: Path, target: str | None = None, **asked: dict[str, Any]) -> vd.Pipeline:
    """source -> clean, a map of it for each of `asked`, and perhaps a written one."""
    docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id")
    clean = docs.project("clean", ["n"])
    for name, given in asked.items():
        arguments = {"trace": str(tmp_path / "constructed"), **given.pop("kwargs", {})}
        clean.map_batches(
            name, Model, schema={"n": "BIGINT"}, fn_constructor_kwargs=arguments, **grouped(given)
        )
    if target is not None:
        clean.write("published", target)
    return docs


def untouched(tmp_path: Path) -> bool:
    """Whether nothing was loaded, computed, committed or left behind."""
    left = [p for p in (tmp_path / "store").rglob("*") if p.is_file()]
    return not (tmp_path / "constructed").exists() and [p.name for p in left] in (
        [],
        ["fragments.json"],
    )


NOBODY_WRITES = "/proc/vane_dagster/folder"  # of root either


def test_all_problems_are_reported_at_once(tmp_path, compute, materialize):
    write_source(tmp_path / "src", ROWS)
    docs = make(
        tmp_path,
        NOBODY_WRITES,
        on_gpus={"gpus": 8},
        on_tape={"resources": {"tape": 2}, "concurrency": 3},
    )
    docs["clean"].map_batches(
        "locked", locked(), schema={"n": "BIGINT"}, reuse=vd.Reuse(version="1")
    )
    place = "the cluster" if isinstance(compute, vd.RayCompute) else "this machine"
    text = failure(materialize(docs, compute, raises=False))
    for words in (
        "4 problems prevent this run; nothing was computed",
        f"stage 'docs/on_gpus': Model asks for a worker of 8 GPU; {place} has 0",
        "stage 'docs/on_tape': Model asks for 3 workers of 2 tape each",
        "stage 'docs/locked': locked.<locals>.call: tuple cannot be pickled for the workers",
        f"target of stage 'docs/published': '{NOBODY_WRITES}/_vane_staging' cannot be written",
    ):
        assert text.count(words) == 1, f"{words!r} in\n{text}"
    assert untouched(tmp_path)


def test_a_plan_that_fails_starts_no_head(tmp_path, materialize):
    ray.shutdown()  # from the head of tests before
    docs = make(tmp_path, NOBODY_WRITES)
    compute = vd.RayCompute(cluster=vd.LocalCluster(name="unstarted", num_cpus=1))
    text = failure(materialize(docs, compute, raises=False))
    assert "no Parquet file at" in text
    assert not LocalHead(name="unstarted").temp_dir.exists()
