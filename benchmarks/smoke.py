"""The first minute of the project against an earlier commit, in pairs within one run.

``make bench-smoke BASE=<commit>`` measures this checkout and the package of that commit in
turns, each in an environment of its own over this one's dependencies. It fails if the median of the
pairs' ratios is above 1.15 in any case:

- ``definitions``: CPU seconds of a process that loads a pipeline of one stage.
- ``cold``: seconds from the start of a process to the end of its first run, which starts a head.
- ``warm``: a run of another partition of 200 rows; ``done``: a run of one that is up to date;
  ``plain``: a run of an asset that reads and writes the same rows with pyarrow alone.
- ``rows``, ``keys``: a warm run of a trivial function over many rows, without and with row keys.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

LIMIT = 1.15
REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = 200
FLOATS = [f"f{number}" for number in range(16)]
RUNS = 5
CASES = ("definitions", "cold", "warm", "done", "plain", "rows", "keys")

Figures = Mapping[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the pairs and print the table; return 1 if a case is slower than the limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smoke", description=__doc__)
    parser.add_argument("--base", help="commit to compare with (default: the last tag, or HEAD~1)")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of `rows` and `keys`")
    parser.add_argument("--session", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.session:
        print(json.dumps(_session(given.session)))
        return 0
    base = _commit(given.base)
    with tempfile.TemporaryDirectory(prefix="vs-", dir="/tmp") as name:
        folder = Path(name)
        _write_input(folder, given.rows)
        sides = {"base": _environment(folder / "b", base), "this": _environment(folder / "t", None)}
        pairs = []
        for number in range(given.pairs):
            order = sorted(sides, reverse=bool(number % 2))
            pairs.append({side: _measure(sides[side], folder, f"{side}{number}") for side in order})
            print(f"pair {number + 1}: {json.dumps(pairs[-1])}", file=sys.stderr, flush=True)
    print(f"{given.pairs} pairs; base: {base[:10]}; seconds are medians\n")
    print("\n".join(table(pairs)))
    slower = [case for case, ratio in ratios(pairs).items() if ratio > LIMIT]
    if slower:
        print(f"\nSlower than {LIMIT} times the base: {', '.join(slower)}")
    return int(bool(slower))


def ratios(pairs: Sequence[Mapping[str, Figures]]) -> dict[str, float]:
    """The median over the pairs of this checkout's figure by the base's, of each case."""
    return {
        case: statistics.median(pair["this"][case] / pair["base"][case] for pair in pairs)
        for case in CASES
    }


def table(pairs: Sequence[Mapping[str, Figures]]) -> list[str]:
    """The lines of a Markdown table of the cases."""
    lines = ["| | base | this | ratio |", "|---|---|---|---|"]
    for case, ratio in ratios(pairs).items():
        base, this = (statistics.median(p[side][case] for p in pairs) for side in ("base", "this"))
        lines.append(f"| {case} | {base:.2f} | {this:.2f} | {ratio:.2f} |")
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


def _measure(python: str, folder: Path, name: str) -> dict[str, float]:
    """The figures of one side: the definitions in a process of their own, the rest in another."""
    home = folder / name
    home.mkdir()
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "VANE_DAGSTER_HOME": str(home),
        "DAGSTER_DISABLE_TELEMETRY": "1",
    }
    from benchmarks.definitions import IMPORTS, cpu_seconds  # a session has no such package

    (home / "definitions.py").write_text(IMPORTS["definitions"])
    definitions = cpu_seconds(python, home / "definitions.py", environment)
    environment["SMOKE_STARTED"] = str(time.time())
    command = [python, __file__, "--session", str(home)]
    try:
        done = subprocess.run(
            command, env=environment, cwd=home, check=True, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{name} failed:\n{error.stderr[-4000:]}") from error
    finally:
        stop = [python, "-m", "vane_dagster", "cluster", "stop"]
        subprocess.run(stop, env=environment, cwd=home, capture_output=True)
    return {"definitions": definitions, **json.loads(done.stdout.splitlines()[-1])}


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


def _session(home: Path) -> dict[str, float]:
    """Measure in this process, from its start on."""
    import dagster as dg

    import vane_dagster as vd

    with dg.DagsterInstance.local_temp(str(home)) as instance:

        def seconds(made: Any, key: str, store: str) -> float:
            resources = {
                "compute": vd.RayCompute(),
                "store": vd.FragmentStore(root=str(home / store)),
            }
            return run(made.build_assets(), key, resources)

        def run(asset: Any, key: str, resources: Mapping[str, Any]) -> float:
            start = time.perf_counter()
            dg.materialize([asset], partition_key=key, instance=instance, resources=resources)
            return time.perf_counter() - start

        def median(measured: Callable[[int], float]) -> float:
            return statistics.median(measured(number) for number in range(1, RUNS + 1))

        rows, keys = pipeline(home), pipeline(home, *FLOATS)
        seconds(rows, "p0", "small")
        cold = time.time() - float(os.environ["SMOKE_STARTED"])
        warm = median(lambda number: seconds(rows, f"p{number}", "small"))
        done = median(lambda number: seconds(rows, f"p{number}", "small"))
        asset = plain_asset(home)
        plain = median(lambda number: run(asset, f"p{number}", {}))
        small = {"cold": cold, "warm": warm, "done": done, "plain": plain}

        def large(made: Any) -> float:
            seconds(made, "p0", made.name)
            return median(lambda number: seconds(made, "all", f"{made.name}{number}"))

        return {**small, "rows": large(rows), "keys": large(keys)}


if __name__ == "__main__":
    sys.exit(main())
