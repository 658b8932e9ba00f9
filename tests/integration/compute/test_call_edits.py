"""Edits of a model between two runs: which of them load it again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.edits import Project
from support.prompts import Reversed
from support.results import metadata
from support.warm_workers import ForkedLocal, end_waiting

SCHEMA = {"id": "BIGINT", "out": "BIGINT", "pid": "BIGINT"}
ROWS = 20
MODELS = """
import os

import helpers

FACTOR = 2


def note(log, *values):
    with open(os.path.join(log, "loads"), "a") as opened:
        opened.write("".join(f"{value}\\n" for value in values))


class Model:
    def __init__(self, log):
        note(log, os.getpid())

    def made(self, n):
        return FACTOR * n + helpers.more(n)

    def __call__(self, batch):
        ids = batch["id"].to_pylist()
        return {"id": ids, "out": [self.made(n) for n in ids], "pid": [os.getpid()] * len(ids)}


def asks(row):
    return f"{os.getpid()} row {row['id'] + helpers.more(0)}"


def uses(row):
    pid, said = row["generated_text"][::-1].split(" ", 1)
    return {"out": FACTOR * len(said), "said": said, "pid": int(pid)}
"""


class Runs:
    """Runs of one pipeline, before and after edits of its models."""

    def __init__(self, project: Project, tmp_path: Path, materialize: Any, compute: Any) -> None:
        self.project, self._folder, self._compute = project, tmp_path, compute
        self._materialize = materialize

    def run(self, force: bool = False) -> Any:
        """Materializes; gives the metadata, the rows' outputs, the pids, and the code version."""
        docs = vd.Pipeline("docs", source=vd.parquet(str(self._folder / "src")), id="id")
        found = self.project.load("Model", "models")
        kwargs = {"log": str(self._folder)}
        docs.map_batches(
            "out", found, schema=SCHEMA, batch_size=5, concurrency=1, fn_constructor_kwargs=kwargs
        )
        config = {"force": True} if force else None
        result: dg.ExecuteInProcessResult = self._materialize(docs, self._compute, config=config)
        rows = read_stage(self._folder / "store", "docs", "out").sort_by("id")
        (pid,) = set(rows["pid"].to_pylist())
        return metadata(result, "out"), rows["out"].to_pylist(), pid

    def prompt(self) -> Any:
        """Materializes a prompt and a stage that reads its answers.

        Gives the metadata of both, the rows' outputs, and the pid of the worker with the model.
        """
        docs = vd.Pipeline("docs", source=vd.parquet(str(self._folder / "src")), id="id")
        after = self.project.load("uses", "models")
        before = sys.modules["models"].asks
        answers = docs.prompt(
            "asked",
            before,
            provider=Reversed,
            model="m",
            output_column="generated_text",
            batch_size=5,
        )
        answers.map(
            "used",
            after,
            schema={"out": "BIGINT", "said": "VARCHAR", "pid": "BIGINT"},
            columns=["generated_text"],
        )
        result = self._materialize(docs, self._compute)
        rows = read_stage(self._folder / "store", "docs", "used").sort_by("id").to_pylist()
        (pid,) = {row["pid"] for row in rows}
        found = metadata(result, "asked"), metadata(result, "used")
        return found, [(row["out"], row["said"]) for row in rows], pid

    @property
    def loads(self) -> list[int]:
        file = self._folder / "loads"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def runs(tmp_path: Path, materialize: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    project = Project(tmp_path / "models")
    monkeypatch.syspath_prepend(str(project.root))
    project.write(models=MODELS, helpers="def more(n):\n    return 100\n")
    write_source(tmp_path / "src", {"id": range(ROWS)})
    yield Runs(project, tmp_path, materialize, ForkedLocal(num_cpus=2))
    project.forget()
    end_waiting()


def test_each_edit_of_the_code_loads_the_model_again(runs):
    _, out, pid = runs.run()
    assert out == [2 * n + 100 for n in range(ROWS)]
    edits = [
        ("models.py", "FACTOR = 2", "FACTOR = 3", lambda n: 3 * n + 100),
        ("models.py", "[self.made(n)", "[10 * self.made(n)", lambda n: 10 * (3 * n + 100)),
        ("helpers.py", "return 100", "return 200", lambda n: 10 * (3 * n + 200)),
    ]
    pids = [pid]
    for *edit, expected in edits:
        runs.project.edit(*edit)
        found, out, pid = runs.run()
        assert out == [expected(n) for n in range(ROWS)]
        assert (found["model_loads"], found["warm_hits"]) == (1, 0)
        assert found["fragments_computed"] == 1
        pids.append(pid)
    assert runs.loads == pids
    assert len(set(pids)) == len(pids)

    found, _, same = runs.run(force=True)
    assert (found["model_loads"], found["warm_hits"], same) == (0, 1, pid)
    runs.project.edit("models.py", "FACTOR = 3", "FACTOR = 3  # a comment")
    found, _, other = runs.run(force=True)
    assert (found["model_loads"], found["warm_hits"]) == (1, 0), "not of the same files"
    assert pid != other


def test_edits_of_functions_around_a_prompt_keep_the_model(runs):
    def expected(factor: int, more: int) -> list[tuple[int, str]]:
        texts = [f"row {n + more}" for n in range(ROWS)]
        return [(factor * len(text), text) for text in texts]

    (asked, _), out, pid = runs.prompt()
    assert (asked["model_loads"], out) == (1, expected(2, 100))
    runs.project.edit("models.py", "FACTOR = 2", "FACTOR = 3")
    (asked, used), out, same = runs.prompt()
    assert (asked["fragments_computed"], used["fragments_computed"]) == (0, 1)
    assert (out, same) == (expected(3, 100), pid)
    runs.project.edit("helpers.py", "return 100", "return 200")
    (asked, _), out, same = runs.prompt()
    assert (asked["model_loads"], asked["fragments_computed"]) == (0, 1)
    assert (out, same) == (expected(3, 200), pid)
    runs.project.edit("models.py", "def uses(row):", "def uses(row):\n    # a comment")
    assert [found["fragments_computed"] for found in runs.prompt()[0]] == [0, 0]
