"""The first minute of the project against an earlier commit, in pairs within one run.

``make bench-smoke BASE=<commit>`` measures this checkout and the package of that commit, each in an
environment of its own over this one's dependencies. Both sessions are up at the same time, and each
figure is taken in both, one right after the other, so that a change of the machine's speed meets
both. It fails if the median of the pairs' ratios is above 1.15 in any case:

- ``definitions``: CPU seconds of a process that loads a pipeline of one stage.
- ``cold``: seconds from the start of a process to the end of its first run, which starts a head.
- ``warm``: a run of another partition of 200 rows; ``done``: a run of one that is up to date;
  ``plain``: a run of an asset that reads and writes the same rows with pyarrow alone.
- ``rows``, ``keys``: a warm run of a trivial function over many rows, without and with row keys.
"""

from __future__ import annotations

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import pyarrow as pa

LIMIT = 1.15
REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = 200
FLOATS = [f"f{number}" for number in range(16)]
RUNS = 5
ANSWER = "seconds: "
CASES = ("definitions", "cold", "warm", "done", "plain", "rows", "keys")

Pairs = dict[str, list[dict[str, float]]]
"""The figures of each case, by side."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the pairs and print the table; return 1 if a case is slower than the limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smoke", description=__doc__)
    parser.add_argument("--base", help="commit to compare with (default: the last tag, or HEAD~1)")
    parser.add_argument("--sessions", type=int, default=3, help="sessions of each side")
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of `rows` and `keys`")
    parser.add_argument("--session", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.session:
        _serve(given.session)
        return 0
    base = _commit(given.base)
    with tempfile.TemporaryDirectory(prefix="vs-", dir="/tmp") as name:
        folder = Path(name)
        _write_input(folder, given.rows)
        sides = {"base": _environment(folder / "b", base), "this": _environment(folder / "t", None)}
        pairs: Pairs = {case: [] for case in CASES}
        for number in range(given.sessions):
            order = sorted(sides, reverse=bool(number % 2))
            for case, measured in _measure({side: sides[side] for side in order}, folder, number):
                pairs[case].append(measured)
                print(f"{case}: {measured}", file=sys.stderr, flush=True)
    print(f"{given.sessions} sessions each; base: {base[:10]}; seconds are medians\n")
    print("\n".join(table(pairs)))
    slower = [case for case, ratio in ratios(pairs).items() if ratio > LIMIT]
    if slower:
        print(f"\nSlower than {LIMIT} times the base: {', '.join(slower)}")
    return int(bool(slower))


def ratios(pairs: Pairs) -> dict[str, float]:
    """The median over the pairs of this checkout's figure by the base's, of each case."""
    return {
        case: statistics.median(pair["this"] / pair["base"] for pair in pairs[case])
        for case in CASES
    }


def table(pairs: Pairs) -> list[str]:
    """The lines of a Markdown table of the cases."""
    lines = ["| | base | this | ratio | pairs |", "|---|---|---|---|---|"]
    for case, ratio in ratios(pairs).items():
        base, this = (statistics.median(p[side] for p in pairs[case]) for side in ("base", "this"))
        lines.append(f"| {case} | {base:.2f} | {this:.2f} | {ratio:.2f} | {len(pairs[case])} |")
    return lines


def _commit(base: str | None) -> str:
    """The commit to compare with."""
    named = [base] if base else [_git("describe", "--tags", "--abbrev=0"), "HEAD~1"]
    for name in filter(None, named):
        if found := _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"):
            return found
    raise SystemExit(f"No commit {named[-1]} in {REPOSITORY}: name one with --base.")


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=REPOSITORY, capture_output=True, text=True)
    return done.stdout.strip()


def _environment(folder: Path, commit: str | None) -> str:
    """An environment with the package of a commit, or of this checkout; return its interpreter.

    Workers import the installed package, whatever the driver's PYTHONPATH is.
    """
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    archive = ["git", "archive", commit] if commit else ["tar", "c"]
    packed = subprocess.run(
        [*archive, "vane_dagster"], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "x", "-C", packages], input=packed.stdout, check=True)
    compileall.compile_dir(packages, quiet=1)
    return str(folder / "bin" / "python")


def _write_input(folder: Path, rows: int) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    floats = np.random.default_rng(0).random((len(FLOATS), rows), np.float32)
    for key, count in [*((f"p{n}", SMALL) for n in range(RUNS + 1)), ("all", rows)]:
        table = pa.table({"id": np.arange(count), **dict(zip(FLOATS, floats[:, :count]))})
        (folder / "source" / key).mkdir(parents=True)
        step = max(SMALL, -(-count // 8))
        for first in range(0, count, step):
            pq.write_table(
                table[first : first + step], folder / "source" / key / f"{first}.parquet"
            )


def _measure(
    sides: Mapping[str, str], folder: Path, number: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the figures of a session of each side, one case and pair after the other.

    Args:
        sides: The interpreter of each side, in the order of the measurements.
        folder: The folder of the input.
        number: The number of the session.
    """
    from benchmarks.definitions import IMPORTS, cpu_seconds  # a session has no such package

    homes = {side: folder / f"{side}{number}" for side in sides}
    environments = {side: _variables(home) for side, home in homes.items()}
    for home in homes.values():
        home.mkdir()
        (home / "definitions.py").write_text(IMPORTS["definitions"])
    yield (
        "definitions",
        {
            side: cpu_seconds(python, homes[side] / "definitions.py", environments[side])
            for side, python in sides.items()
        },
    )
    with ExitStack() as stack:
        asks, cold = {}, {}
        for side, python in sides.items():
            started = time.perf_counter()
            session = _session(python, homes[side], environments[side])
            asks[side] = stack.enter_context(session)
            asks[side]("warm", 0)
            cold[side] = time.perf_counter() - started
        yield "cold", cold
        for case in CASES[2:]:
            for run in range(0 if case in ("rows", "keys") else 1, RUNS + 1):
                order = sorted(sides, reverse=bool((number + run) % 2))
                measured = {side: asks[side](case, run) for side in order}
                if run:
                    yield case, measured


def _variables(home: Path) -> dict[str, str]:
    """The environment variables of a session."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**kept, "VANE_DAGSTER_HOME": str(home), "DAGSTER_DISABLE_TELEMETRY": "1"}


@contextmanager
def _session(
    python: str, home: Path, environment: Mapping[str, str]
) -> Iterator[Callable[[str, int], float]]:
    """Start a session; what it yields runs a case there and returns its seconds."""
    command = [python, __file__, "--session", str(home)]
    pipe = subprocess.PIPE
    log = home / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=environment, cwd=home, stdin=pipe, stdout=pipe, stderr=errors, text=True
        ) as process,
    ):
        given, answers = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

        def ask(case: str, number: int) -> float:
            print(case, number, file=given, flush=True)
            for line in answers:
                if line.startswith(ANSWER):
                    return float(line.removeprefix(ANSWER))
            raise SystemExit(f"{home.name} failed:\n{log.read_text()[-4000:]}")

        try:
            yield ask
        finally:
            given.close()
            process.wait()
            stop = [python, "-m", "vane_dagster", "cluster", "stop"]
            subprocess.run(stop, env=environment, cwd=home, capture_output=True)


def add(batch: pa.Table) -> dict[str, Any]:
    """A function that costs nothing."""
    import pyarrow.compute as pc

    return {"sum": pc.add(batch["f0"], batch["f1"])}


def pipeline(home: Path, *columns: str) -> Any:
    """A pipeline of one stage; row keys are computed if the stage names its columns."""
    import dagster as dg

    import vane_dagster as vd

    keys = [*(f"p{number}" for number in range(RUNS + 1)), "all"]
    made = vd.Pipeline(
        "keys" if columns else "rows",
        source=vd.parquet(str(home.parent / "source" / "{partition_key}")),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(keys),
    )
    made.map_batches(
        "added",
        add,
        schema={"sum": "FLOAT"},
        batch_size=50_000,
        concurrency=2,
        columns=columns or None,
    )
    return made


def plain_asset(home: Path) -> Any:
    """An asset that adds two columns with pyarrow."""
    import dagster as dg
    import pyarrow.parquet as pq

    keys = [f"p{number}" for number in range(RUNS + 1)]

    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(keys))
    # Dagster resolves annotations by the module's names, which do not include its own here.
    def plain(context) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        rows = pq.read_table(home.parent / "source" / context.partition_key)
        pq.write_table(rows.append_column("sum", add(rows)["sum"]), home / "plain.parquet")

    return plain


def _serve(home: Path) -> None:
    """Run the cases that standard input names, and print the seconds of each."""
    import dagster as dg

    import vane_dagster as vd

    with dg.DagsterInstance.local_temp(str(home)) as instance:
        made, asset = {"rows": pipeline(home), "keys": pipeline(home, *FLOATS)}, plain_asset(home)

        def seconds(case: str, number: int) -> float:
            key = "all" if case in made and number else f"p{number}"
            # A run of all rows has a store of its own; those of few rows share one.
            store = f"{case}{number}" if case in made else "small"
            resources = {
                "compute": vd.RayCompute(),
                "store": vd.FragmentStore(root=str(home / store)),
            }
            assets = asset if case == "plain" else made.get(case, made["rows"]).build_assets()
            given = {} if case == "plain" else resources
            start = time.perf_counter()
            dg.materialize([assets], partition_key=key, instance=instance, resources=given)
            return time.perf_counter() - start

        for line in sys.stdin:
            case, number = line.split()
            print(f"{ANSWER}{seconds(case, int(number))}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
