"""Runs whose prompts begin alike: the order in which they are asked."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from pathlib import Path

import pyarrow as pa

import vane_dagster as vd
from support.data import read_stage, write_source
from vane_dagster.providers.base import Answer, Request

LONG = [letter * 300 for letter in "abcdefgh"]


class WaveProgress:
    """Answers with its process and how many it was asked before."""

    def __init__(self, model: str) -> None:
        self.asked = 0

    async def submit(self, request: Request) -> Answer:
        self.asked += 1
        if request.messages[-1]["content"].endswith("poison"):
            raise ValueError("no answer to this")
        return Answer(f"{os.getpid()} {self.asked} {request.messages[-1]['content'][:1]}")


def asked(tmp_path: Path) -> dict[int, list[str]]:
    """First letters of prompts in the order in which each process was asked."""
    found = defaultdict(list)
    for answer in read_stage(tmp_path / "store", "docs", "asked")["asked"].to_pylist():
        pid, number, letter = answer.split()
        found[int(pid)].append((int(number), letter))
    return {pid: [letter for _, letter in sorted(times)] for pid, times in found.items()}


def docs(tmp_path: Path, count: int, texts: list[str]) -> vd.Pipeline:
    ids = pa.array(range(count), pa.int64())
    table = {"id": ids, "doc": [LONG[i % 4] for i in range(count)], "text": texts}
    write_source(tmp_path / "src", table)
    return vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")


def test_a_fragments_prompts_are_asked_in_order_and_answered_in_their_own(
    tmp_path, local, materialize
):
    texts = ["poison" if i in (0, 5, 39) else f"{i}" for i in range(40)]
    pipeline = docs(tmp_path, 40, texts)
    pipeline.project("clean", ["doc", "text"]).prompt(
        "asked",
        "{doc} {text}",
        provider=WaveProgress,
        model="m",
        batch_size=3,
        on_error=vd.Failures("quarantine", max_error_rate=1.0),
        concurrency=vd.Workers(max_concurrency=1),
    )

    materialize(pipeline, local)

    found = read_stage(tmp_path / "store", "docs", "asked")
    assert found["id"].to_pylist() == [i for i in range(40) if texts[i] != "poison"]
    letters = [answer.split()[-1] for answer in found["asked"].to_pylist()]
    assert letters == ["abcd"[i % 4] for i in range(40) if texts[i] != "poison"]
    (order_asked,) = asked(tmp_path).values()
    changes = sum(a != b for a, b in itertools.pairwise(order_asked))
    assert changes < 20, "a batch of three has two letters at most; as they stood there were 36"
