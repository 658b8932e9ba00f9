"""Three days over the same table: everything, then some changes and failures, then an edit.

Each day is a new process of each contender, on a cluster of that day that is up before the clock.
On the second day 2% of the rows have another text and 1% are new, the function raises on one of
each, a column is added that nobody reads, and the first worker to call the function is killed. On
the third day one line of the function is edited. A process that fails is started again, twice.
With `--prompts` the rows are prompts to an endpoint, which refuses what the function raises on.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from benchmarks.command import chosen, end_on_sigterm, parser, turns, write
from benchmarks.harness import (
    ROOT,
    BenchmarkError,
    Contender,
    process_environment,
    run_process,
    running_cluster,
)
from benchmarks.job import Job, Step
from benchmarks.report import LABELS, machine, row, spread
from benchmarks.second_day.days import EDIT, Day, Vectors, from_nothing, three_days, version
from benchmarks.second_day.embedder import STATE, Trivial
from benchmarks.second_day.judge import Verdict, judge
from benchmarks.second_day.prompts import endpoint
from benchmarks.workloads import MiniLM

PACKAGE = "benchmarks.second_day"
CONTENDERS = (
    Contender("vane", f"{PACKAGE}.vane", "vane_dagster", serves=True),
    Contender("vane_local", f"{PACKAGE}.vane_local", "vane_dagster"),
    Contender("raydata", f"{PACKAGE}.raydata", "ray", serves=True),
    Contender("daft", f"{PACKAGE}.daft_", "daft", serves=True),
    Contender("anti_join", f"{PACKAGE}.anti_join", "daft"),
    Contender("anti_join_version", f"{PACKAGE}.anti_join_version", "daft"),
)
PROMPTS = tuple(
    replace(one, module=one.module.replace(PACKAGE, f"{PACKAGE}.prompts"))
    for one in CONTENDERS
    if one.key not in ("vane_local", "anti_join")
)
ATTEMPTS = 3
ROWS, QUICK_ROWS = 4000, 200
HEAD = (
    "day", "contender", "seconds", "cluster", "calls", "loads", "cents", "starts",
    "right", "stale", "missing", "wrong or twice", "MB",
)  # fmt: skip
NOTE = (
    "Seconds: of whole processes, from their start to their end, those that failed included. "
    "cluster: seconds in which the day's cluster starts, before the clock. calls: rows given to "
    "the model, or requests. loads: models constructed. cents: the price of the endpoint's "
    "answers. starts: processes, of which all but the last failed; * where the last failed too. "
    "right, stale (an output of an earlier day), missing, wrong and twice: rows of the output "
    "against those of a run from nothing, which has {expected} on the three days: all but the two"
    " that fail. MB: all files of the output. Two workers of one torch thread each, batches of "
    "64. Medians of {repeats} interleaved repeats; in brackets the lowest and the highest."
)


@dataclass(frozen=True)
class Measured:
    """One contender on one day.

    Args:
        contender: Key of `LABELS`.
        day: Its number.
        repeat: Number of the repeat.
        serving: Seconds in which its cluster started.
        seconds: Wall seconds of all its processes.
        calls: Rows given to the model.
        loads: Constructed models.
        cents: Price of the endpoint's answers.
        verdict: What its output is worth.
        megabytes: Size of its output, checkpoints included.
        errors: Of each process that failed.
        ended: Whether the last process succeeded.
        versions: Package versions in the process.
    """

    contender: str
    day: int
    repeat: int
    serving: float
    seconds: float
    calls: int
    loads: int
    cents: float
    verdict: Verdict
    megabytes: float
    errors: Sequence[str] = ()
    ended: bool = True
    versions: dict[str, str] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the JSON.

    Returns:
        1 if an output of ours differs from a run from nothing, else 0.
    """
    options = _parser().parse_args(arguments)
    end_on_sigterm()
    rows = options.rows or (QUICK_ROWS if options.quick else ROWS) * options.times
    days = three_days(rows)
    expected = from_nothing(days, _answer if options.prompts else _embed(options.quick))
    all_contenders = PROMPTS if options.prompts else CONTENDERS
    contenders = [one for one in all_contenders if not options.only or one.key in options.only]
    measured = []
    with tempfile.TemporaryDirectory(prefix="vb", dir=options.temp) as folder:
        for repeat, contender in turns(chosen(contenders, options), options.repeat):
            runner = Runner(contender, Path(folder, str(repeat), contender.key), options.quick)
            with runner.endpoint() if options.prompts else contextlib.nullcontext():
                for day in days:
                    measured.append(runner.run(day, expected, repeat))
                    print(row(_cells(measured[-1:])), file=sys.stderr, flush=True)
    found = machine()
    versions = {name: value for one in measured for name, value in one.versions.items()}
    print(
        f"{found['cores']} cores ({found['cpu']}), {found['memory']}, Python {found['python']}; "
        + ", ".join(f"{name} {value}" for name, value in versions.items())
    )
    note = NOTE.format(expected=[len(one) for one in expected], repeats=options.repeat)
    print(f"\n{table(measured)}\n\n{note}")
    print(
        f"\nWritten: {write(options, found, {'days': [asdict(one) for one in measured]}, 'days-')}"
    )
    ours = [one for one in measured if one.contender.startswith("vane")]
    return 0 if all(one.verdict.equal for one in ours) else 1


def table(measured: Sequence[Measured]) -> str:
    """Return the Markdown table, day by day."""
    repeats: dict[tuple[int, str], list[Measured]] = {}
    for one in sorted(measured, key=lambda one: one.day):
        repeats.setdefault((one.day, one.contender), []).append(one)
    return "\n".join(
        [row(HEAD), row(["---"] * len(HEAD)), *map(row, map(_cells, repeats.values()))]
    )


def _cells(repeats: Sequence[Measured]) -> list[str]:
    """Return the table's row of one contender on one day."""
    verdicts = [one.verdict for one in repeats]
    starts = _range([len(one.errors) + one.ended for one in repeats])
    ended = all(one.ended for one in repeats)
    serving = [one.serving for one in repeats]
    return [
        str(repeats[0].day),
        LABELS[repeats[0].contender],
        spread([one.seconds for one in repeats], ".1f"),
        f"{median(serving):.1f}" if any(serving) else "none",
        _range([one.calls for one in repeats]),
        _range([one.loads for one in repeats]),
        f"{median(one.cents for one in repeats):.2f}",
        starts + ("" if ended else "*"),
        _range([one.right for one in verdicts]),
        _range([one.stale for one in verdicts]),
        _range([one.missing for one in verdicts]),
        _range([one.wrong + one.twice for one in verdicts]),
        f"{median(one.megabytes for one in repeats):.1f}",
    ]


def _range(counts: Sequence[int]) -> str:
    """Return the count of all repeats, or the lowest and the highest."""
    return "-".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))


class Runner:
    """One contender with its source, code and outputs, from day to day."""

    def __init__(self, contender: Contender, folder: Path, quick: bool) -> None:
        """Create the folders."""
        self.contender, self.folder, self.quick = contender, folder, quick
        self.url = ""
        for name in ("source", "code", "state/loads", "out"):
            (folder / name).mkdir(parents=True)

    @contextlib.contextmanager
    def endpoint(self) -> Iterator[None]:
        """Run the endpoint that answers this contender's prompts."""
        command = [sys.executable, "-m", endpoint.__name__, str(self.folder / "state")]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            self.url = f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
            try:
                yield
            finally:
                server.kill()

    def run(self, day: Day, expected: Sequence[Vectors], repeat: int) -> Measured:
        """Change what changes on a day, run its process, and judge the output.

        Args:
            day: The day.
            expected: The vectors of all days.
            repeat: Number of the repeat.
        """
        state = self.folder / "state"
        loads = _count(state / "loads")
        for name in ("calls", "tokens"):
            (state / name).write_bytes(b"")
        day.write(self.folder / "source", self.folder / "code")
        if day.kills:
            (state / "kill").touch()
        errors, serving, seconds, versions = self._attempts(day)
        if (state / "kill").exists():
            raise BenchmarkError(f"{LABELS[self.contender.key]}: no worker was killed")
        index, out = day.number - 1, self.folder / "out"
        return Measured(
            self.contender.key,
            day.number,
            repeat,
            serving,
            seconds,
            sum(map(int, (state / "calls").read_text().split())),
            _count(state / "loads") - loads,
            _cents(state / "tokens"),
            judge(self._read(day), expected[index], expected[:index], day.failing),
            sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 1e6,
            errors,
            ended=bool(versions),
            versions=versions,
        )

    def _attempts(self, day: Day) -> tuple[list[str], float, float, dict[str, str]]:
        """Run the day's process until it succeeds, or has failed too often."""
        # Short: it holds the sockets of Ray.
        temp = self.folder / f"t{day.number}"
        temp.mkdir()
        step = Step("day", str(self.folder / "source"), str(self.folder / "out"))
        module, state = self.contender.module, self.folder / "state"
        job = Job(module, "second_day", self.quick, (step,), str(state / "loads"), str(temp))
        environment = process_environment(self.contender) | {STATE: str(state)}
        environment[endpoint.URL] = self.url
        environment["PYTHONPATH"] += f":{self.folder / 'code'}"
        errors: list[str] = []
        serving = seconds = 0.0
        with contextlib.ExitStack() as stack:
            if self.contender.serves:
                started = time.perf_counter()
                cluster = running_cluster(self.contender, job, environment, self.folder)
                job = replace(job, service=stack.enter_context(cluster))
                serving = time.perf_counter() - started
            while len(errors) < ATTEMPTS:
                started = time.perf_counter()
                try:
                    result = run_process(self.contender, job, environment, self.folder, 3600)
                    seconds += time.perf_counter() - started
                    return errors, serving, seconds, dict(result.versions)
                except BenchmarkError as error:
                    errors.append(str(error))
                    print(error, file=sys.stderr, flush=True)
                    seconds += time.perf_counter() - started
                    (self.folder / "run.log").rename(temp / f"failed{len(errors)}.log")
        return errors, serving, seconds, {}

    def _read(self, day: Day) -> pa.Table:
        """Return the output as its user reads it; no rows where nothing was written."""
        out = self.folder / "out"
        if not any(out.iterdir()):
            return _vectors(
                pa.table(
                    {
                        "id": pa.array([], pa.int64()),
                        "embedding": pa.array([], pa.list_(pa.float32(), 1)),
                    }
                )
            )
        if self.contender.package == "vane_dagster":
            from benchmarks.second_day import vane

            return _vectors(vane.read(out, day.failing))
        # A process that is killed while it writes leaves a file without an end, or without rows.
        files = [str(path) for path in (out / "rows").rglob("*.parquet") if _complete(path)]
        found = ds.dataset(files, format="parquet").to_table()
        # Old versions of changed rows stay in the files: who reads them joins with the source.
        found = found.filter(pc.is_in(found["key"], pa.array(day.keys.values())))
        if "version" in found.column_names:
            today = (
                EDIT[day.edited][2:-1] if self.url else version(self.folder / "code/embedder.py")
            )
            found = found.filter(pc.equal(found["version"], today))
        return _vectors(found)


def _vectors(found: pa.Table) -> pa.Table:
    """Return ids and vectors; a number that an endpoint answered is a vector of one."""
    if "answer" in found.column_names:
        numbers = found["answer"].cast(pa.float32()).to_pylist()
        lists = [None if number is None else [number] for number in numbers]
        found = found.append_column("embedding", pa.array(lists, pa.list_(pa.float32(), 1)))
    return found.select(["id", "embedding"])


def _cents(path: Path) -> float:
    """Return the price of the answered requests."""
    counts = [tuple(map(int, line.split())) for line in path.read_text().splitlines()]
    dollars = sum(p * endpoint.PRICES[0] + a * endpoint.PRICES[1] for p, a in counts) / 1e6
    return 100 * dollars


def _answer(texts: list[str]) -> np.ndarray:
    """Return the answers to prompts, each as a vector of one number."""
    return np.array([[endpoint.number(text)] for text in texts], np.float32)


def _complete(path: Path) -> bool:
    try:
        return bool(ds.dataset(path, format="parquet").schema)
    except pa.ArrowInvalid:
        return False


def _count(folder: Path) -> int:
    return len(list(folder.iterdir()))


def _embed(quick: bool) -> Callable[[list[str]], np.ndarray]:
    """Return the function that computes the vectors of a run from nothing, batch by batch."""
    with tempfile.TemporaryDirectory() as marks:
        model = (Trivial if quick else MiniLM)(marks)

    def embed(texts: list[str]) -> np.ndarray:
        flat: np.ndarray = model.compute(pa.array(texts)).flatten().to_numpy()
        return flat.reshape(len(texts), -1)

    return embed


def _parser() -> argparse.ArgumentParser:
    keys = [one.key for one in CONTENDERS]
    made = parser("python -m benchmarks.second_day", __doc__, keys)
    made.add_argument("--rows", type=int, help=f"of the first day (default {ROWS:,})")
    made.add_argument("--prompts", action="store_true", help="to an endpoint, in place of a model")
    made.add_argument("--times", type=int, default=1, help="factor of the rows")
    return made


if __name__ == "__main__":
    sys.exit(main())
