"""Runs the same work with a bare loop, Ray Data, Daft and vane_dagster, and prints ratios.

The timing covers reading Parquet, the UDF, and writing Parquet, from the call that starts the work
to the last file written, inside the contender's process; for vane_dagster that is Dagster's step.
It excludes starting Python, importing the framework, starting a cluster that outlives the runs, and
checking the output. Workload (a) also reports the total wall time, with starts, imports and loads.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.harness import CONTENDERS, Contender, measure, prepare
from benchmarks.report import GENERAL, LABELS, Measurement, machine, machine_line, table
from benchmarks.workloads import workload

RESULTS = Path(__file__).resolve().parent / "results"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=("a", "b", "c"), help="a workload")
    parser.add_argument("--repeat", type=int, default=3, help="repeats (default 3)")
    parser.add_argument("--skip", action="append", default=[], choices=tuple(LABELS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a smoke test")
    parser.add_argument(
        "--daft-python",
        default=sys.executable,
        help="interpreter with Daft, where its pyarrow pin does not fit this environment",
    )
    parser.add_argument("--temp", type=Path, help="a short folder for temporary files")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat: expected at least 1, got {options.repeat}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and write the JSON.

    Returns:
        1 if a contender failed, else 0.
    """
    options = parse(arguments)
    # Raise an exception, so that clusters are stopped and folders removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    contenders = [
        replace(contender, python=options.daft_python) if contender.key == "daft" else contender
        for contender in CONTENDERS
        if contender.key not in options.skip
    ]
    measured = {
        key: _workload(key, contenders, options)
        for key in sorted(set(options.only or ("a", "b", "c")))
    }
    everything = [one for several in measured.values() for one in several]
    found = machine()
    print(machine_line(found, everything))
    for key, several in measured.items():
        print("\n" + table(workload(key, options.quick), several))
    print("\n" + GENERAL.format(repeats=options.repeat))
    if options.quick:
        print("\nQuick sizes: a smoke test, not a measurement.")
    print(f"\nWritten: {_write(options, found, measured)}")
    return 1 if any(one.error for one in everything) else 0


def _workload(
    key: str, contenders: Sequence[Contender], options: argparse.Namespace
) -> list[Measurement]:
    work = workload(key, options.quick)
    measured = []
    with tempfile.TemporaryDirectory(prefix="vb", dir=options.temp) as folder:
        bench = prepare(work, options.quick, Path(folder))
        for repeat in range(options.repeat):
            for contender in contenders:
                start = time.perf_counter()
                measured.append(measure(bench, contender, repeat))
                took = time.perf_counter() - start
                state = measured[-1].error or f"{measured[-1].rate(work):,.0f} rows/s"
                label = f"({key}) repeat {repeat + 1} {LABELS[contender.key]}"
                print(f"{label}: {state} [{took:.0f} s]", file=sys.stderr, flush=True)
    return measured


def _write(
    options: argparse.Namespace,
    found: dict[str, str],
    measured: dict[str, list[Measurement]],
) -> Path:
    results: Path = options.results
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    content = {
        "machine": found,
        "quick": options.quick,
        "repeats": options.repeat,
        "workloads": {
            key: [
                {**asdict(one), "rows_per_second": None if one.error else one.rate(work)}
                for one in several
            ]
            for key, several in measured.items()
            for work in (workload(key, options.quick),)
        },
    }
    path.write_text(json.dumps(content, indent=1))
    return path


if __name__ == "__main__":
    sys.exit(main())
