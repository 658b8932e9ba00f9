"""Three days over the same table: everything, then some changes and failures, then an edit.

Each day is a new process of each contender, on a cluster of that day that is up before the clock.
On the second day 2% of the rows have another text and 1% are new, the function raises on one of
them, a column is added that nobody reads, and the first worker to call the function is killed. On
the third day one line of the function is edited. A process that fails is started again, twice.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from benchmarks.command import RESULTS, chosen, end_on_sigterm, write
from benchmarks.harness import (
    BenchmarkError,
    Contender,
    process_environment,
    run_process,
    running_cluster,
)
from benchmarks.job import Job, Step
from benchmarks.report import LABELS, machine, row
from benchmarks.second_day.days import Day, Texts, Vectors, from_nothing, three_days
from benchmarks.second_day.embedder import STATE, Trivial
from benchmarks.second_day.judge import Verdict, judge
from benchmarks.workloads import MiniLM

PACKAGE = "benchmarks.second_day"
CONTENDERS = (
    Contender("vane", f"{PACKAGE}.vane", "vane_dagster", serves=True),
    Contender("vane_local", f"{PACKAGE}.vane_local", "vane_dagster"),
    Contender("raydata", f"{PACKAGE}.raydata", "ray", serves=True),
    Contender("daft", f"{PACKAGE}.daft_", "daft", serves=True),
    Contender("anti_join", f"{PACKAGE}.anti_join", "daft"),
    Contender("anti_join_text", f"{PACKAGE}.anti_join_text", "daft"),
)
ATTEMPTS = 3
ROWS, QUICK_ROWS = 4000, 200
HEAD = (
    "day", "contender", "seconds", "calls", "loads", "starts", "equal to a run from nothing",
    "right", "stale", "missing", "wrong", "twice",
)  # fmt: skip
NOTE = (
    "Seconds: of whole processes, from their start to their end, those that failed included. "
    "calls: rows given to the model. loads: models constructed. starts: processes, of which all "
    "but the last failed; * where the last failed too. right, stale (a vector of an earlier day), "
    "missing, wrong and twice: rows of the output against those of a run from nothing, which has "
    "{expected} on the three days: all but the one that the function raises on. Two workers of one "
    "torch thread each, batches of 64."
)


@dataclass(frozen=True)
class Measured:
    """One contender on one day.

    Args:
        contender: Key of `LABELS`.
        day: Its number.
        seconds: Wall seconds of all its processes.
        calls: Rows given to the model.
        loads: Constructed models.
        verdict: What its output is worth.
        errors: Of each process that failed.
        ended: Whether the last process succeeded.
        versions: Package versions in the process.
    """

    contender: str
    day: int
    seconds: float
    calls: int
    loads: int
    verdict: Verdict
    errors: Sequence[str] = ()
    ended: bool = True
    versions: dict[str, str] = field(default_factory=dict)

    def cells(self) -> list[str]:
        """Return its row of the table."""
        verdict = self.verdict
        counts = (verdict.right, verdict.stale, verdict.missing, verdict.wrong, verdict.twice)
        return [
            str(self.day),
            LABELS[self.contender],
            f"{self.seconds:.1f}",
            f"{self.calls:,}",
            str(self.loads),
            f"{len(self.errors) + self.ended}{'' if self.ended else '*'}",
            "yes" if verdict.equal else "**no**",
            *(f"{count:,}" for count in counts),
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the JSON.

    Returns:
        1 if an output of ours differs from a run from nothing, else 0.
    """
    options = _parser().parse_args(arguments)
    end_on_sigterm()
    rows = options.rows or (QUICK_ROWS if options.quick else ROWS) * options.times
    days = three_days(rows)
    expected = from_nothing(days, _embed(options.quick))
    contenders = [one for one in CONTENDERS if not options.only or one.key in options.only]
    measured = []
    with tempfile.TemporaryDirectory(prefix="vb", dir=options.temp) as folder:
        for contender in chosen(contenders, options):
            runner = Runner(contender, Path(folder, contender.key[:12]), options.quick)
            for day in days:
                measured.append(runner.run(day, expected))
                print(row(measured[-1].cells()), file=sys.stderr, flush=True)
    found = machine()
    versions = {name: value for one in measured for name, value in one.versions.items()}
    print(
        f"{found['cores']} cores ({found['cpu']}), {found['memory']}, Python {found['python']}; "
        + ", ".join(f"{name} {value}" for name, value in versions.items())
    )
    print("\n" + table(measured) + "\n\n" + NOTE.format(expected=[len(one) for one in expected]))
    print(
        f"\nWritten: {write(options, found, {'days': [asdict(one) for one in measured]}, 'days-')}"
    )
    ours = [one for one in measured if one.contender.startswith("vane")]
    return 0 if all(one.verdict.equal for one in ours) else 1


def table(measured: Sequence[Measured]) -> str:
    """Return the Markdown table, day by day."""
    ordered = sorted(measured, key=lambda one: one.day)
    return "\n".join([row(HEAD), row(["---"] * len(HEAD)), *(row(one.cells()) for one in ordered)])


class Runner:
    """One contender with its source, code and outputs, from day to day."""

    def __init__(self, contender: Contender, folder: Path, quick: bool) -> None:
        """Create the folders."""
        self.contender, self.folder, self.quick = contender, folder, quick
        for name in ("source", "code", "state/loads", "out"):
            (folder / name).mkdir(parents=True)

    def run(self, day: Day, expected: Sequence[Vectors]) -> Measured:
        """Change what changes on a day, run its process, and judge the output.

        Args:
            day: The day.
            expected: The vectors of all days.
        """
        state = self.folder / "state"
        loads = _count(state / "loads")
        (state / "calls").write_bytes(b"")
        day.write(self.folder / "source", self.folder / "code")
        if day.kills:
            (state / "kill").touch()
        errors, seconds, versions = self._attempts(day)
        if (state / "kill").exists():
            raise BenchmarkError(f"{LABELS[self.contender.key]}: no worker was killed")
        index = day.number - 1
        return Measured(
            self.contender.key,
            day.number,
            seconds,
            sum(map(int, (state / "calls").read_text().split())),
            _count(state / "loads") - loads,
            judge(self._read(day.texts), expected[index], expected[:index]),
            errors,
            ended=bool(versions),
            versions=versions,
        )

    def _attempts(self, day: Day) -> tuple[list[str], float, dict[str, str]]:
        """Run the day's process until it succeeds, or has failed too often."""
        # Short: it holds the sockets of Ray.
        temp = self.folder / f"t{day.number}"
        temp.mkdir()
        step = Step("day", str(self.folder / "source"), str(self.folder / "out"))
        module, state = self.contender.module, self.folder / "state"
        job = Job(module, "second_day", self.quick, (step,), str(state / "loads"), str(temp))
        environment = process_environment(self.contender) | {STATE: str(state)}
        environment["PYTHONPATH"] += f":{self.folder / 'code'}"
        errors: list[str] = []
        seconds = 0.0
        with contextlib.ExitStack() as stack:
            if self.contender.serves:
                cluster = running_cluster(self.contender, job, environment, self.folder)
                job = replace(job, service=stack.enter_context(cluster))
            while len(errors) < ATTEMPTS:
                started = time.perf_counter()
                try:
                    result = run_process(self.contender, job, environment, self.folder, 3600)
                    return errors, seconds + time.perf_counter() - started, dict(result.versions)
                except BenchmarkError as error:
                    errors.append(str(error))
                    print(error, file=sys.stderr, flush=True)
                    seconds += time.perf_counter() - started
                    (self.folder / "run.log").rename(temp / f"failed{len(errors)}.log")
        return errors, seconds, {}

    def _read(self, texts: Texts) -> pa.Table:
        """Return the output as its user reads it; no rows where nothing was written."""
        out = self.folder / "out"
        if not any(out.iterdir()):
            return pa.table({"id": pa.array([], pa.int64()), "embedding": pa.nulls(0)})
        if self.contender.package == "vane_dagster":
            from benchmarks.second_day import vane

            return vane.read(out)
        # A process that is killed while it writes leaves a file without an end, or without rows.
        files = [str(path) for path in (out / "rows").rglob("*.parquet") if _complete(path)]
        found = ds.dataset(files, format="parquet").to_table()
        if "text" in found.column_names:
            # Old versions of changed rows stay in the files: who reads them joins with the source.
            pairs = zip(found["id"].to_pylist(), found["text"].to_pylist())
            found = found.filter(pa.array([texts[id] == text for id, text in pairs], pa.bool_()))
        return found.select(["id", "embedding"])


def _complete(path: Path) -> bool:
    try:
        return bool(ds.dataset(path, format="parquet").schema)
    except pa.ArrowInvalid:
        return False


def _count(folder: Path) -> int:
    return len(list(folder.iterdir()))


def _embed(quick: bool):  # type: ignore[no-untyped-def]
    """Return the function that computes the vectors of a run from nothing, batch by batch."""
    with tempfile.TemporaryDirectory() as marks:
        model = (Trivial if quick else MiniLM)(marks)

    def embed(texts: list[str]) -> np.ndarray:
        flat: np.ndarray = model.compute(pa.array(texts)).flatten().to_numpy()
        return flat.reshape(len(texts), -1)

    return embed


def _parser() -> argparse.ArgumentParser:
    keys = [one.key for one in CONTENDERS]
    made = argparse.ArgumentParser(prog="python -m benchmarks.second_day", description=__doc__)
    made.add_argument("--rows", type=int, help=f"of the first day (default {ROWS:,})")
    made.add_argument("--times", type=int, default=1, help="factor of the rows")
    made.add_argument("--only", action="append", choices=keys, help="a contender")
    made.add_argument("--skip", action="append", default=[], choices=keys)
    made.add_argument("--quick", action="store_true", help="200 rows, a trivial function: a test")
    made.add_argument("--daft-python", default=sys.executable, help="interpreter with Daft and Ray")
    made.add_argument("--temp", type=Path, help="a short folder for temporary files")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    made.set_defaults(repeat=1)
    return made


if __name__ == "__main__":
    sys.exit(main())
