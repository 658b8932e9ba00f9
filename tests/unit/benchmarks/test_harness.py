"""What benchmarks measure with: their input, how they verify what comes out, and comparisons."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import harness, smoke
from benchmarks.harness import CONTENDERS, BenchmarkError, prepare, verify
from benchmarks.job import Step
from benchmarks.workloads import workload

BARE = CONTENDERS[0]


@pytest.fixture
def bench(tmp_path: Path) -> harness.Bench:
    return prepare(workload("b", quick=True), True, tmp_path)


def correct(bench: harness.Bench) -> pa.Table:
    table = pq.read_table(bench.partitions[0])
    return table.append_column("y", pa.array(table["x"].to_numpy() * np.float32(2)))


def test_rows_in_any_order_and_cut_are_right(bench: harness.Bench, tmp_path: Path) -> None:
    table = correct(bench)
    shuffled = table.take(np.random.default_rng(0).permutation(table.num_rows))
    out = tmp_path / "out"
    out.mkdir()
    pq.write_table(shuffled.slice(0, 7), out / "0.parquet")
    pq.write_table(shuffled.slice(7), out / "1.parquet")
    verify(bench, BARE, [Step("p0", "", str(out))], [])


def turned(table: pa.Table, nan: bool = False) -> pa.Table:
    values = table["y"].to_numpy().copy()
    if nan:
        values[3] = np.nan
    return table.set_column(2, "y", pa.array(values if nan else values[::-1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.slice(1), "rows: expected 256, got 255"),
        (lambda t: t.take([0, 0, *range(2, 256)]), "distinct ids: expected 256, got 255"),
        (turned, "checksum of y"),
        (lambda table: turned(table, nan=True), "checksum of y"),
        (lambda table: table.drop_columns(["y"]), "columns: expected"),
        (lambda table: table.slice(256), "rows: expected 256, got 0"),
    ],
)
def test_wrong_rows_are_found(bench: harness.Bench, tmp_path: Path, change, message: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    pq.write_table(change(correct(bench)), out / "0.parquet")
    with pytest.raises(BenchmarkError, match=message):
        verify(bench, BARE, [Step("p0", "", str(out))], [])


def compared(monkeypatch: pytest.MonkeyPatch, *sessions: dict[str, float]) -> int:
    """The exit code of a comparison in which some cases take so many times the base's seconds."""
    measured = iter(sessions)

    def measure(sides: object, folder: object, number: int) -> object:
        slower = next(measured)
        return [(case, {"base": 2.0, "this": 2.0 * slower.get(case, 1.0)}) for case in smoke.CASES]

    monkeypatch.setattr(smoke, "_environment", lambda folder, commit: "base" if commit else "this")
    monkeypatch.setattr(smoke, "_measure", measure)
    monkeypatch.setattr(smoke, "_commit", lambda base: "0123456789abcdef")
    return smoke.main(["--sessions", str(len(sessions)), "--rows", "1000"])


def test_a_case_that_is_slower_in_most_pairs_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(monkeypatch, {"warm": 1.2}, {"warm": 1.3}, {}) == 1
    printed = capsys.readouterr().out
    assert "| warm | 2.00 | 2.40 | 1.20 | 3 |" in printed
    assert printed.endswith("Slower than 1.15 times the base: warm\n")


def test_one_slow_pair_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(monkeypatch, {}, {"cold": 3.0}, {"rows": 0.5}) == 0
