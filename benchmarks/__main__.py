"""Runs the same work with a bare loop, Ray Data, Daft and vane_dagster, and prints ratios.

The timing covers reading Parquet, the UDF, and writing Parquet, from the call that starts the work
to the last file written, inside the contender's process; for vane_dagster that is Dagster's step.
It excludes starting Python, importing the framework, starting a cluster that outlives the runs, and
checking the output. Workload (a) also reports the total wall time, with starts, imports and loads.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.command import chosen, end_on_sigterm, measure_all, parser, write
from benchmarks.harness import CONTENDERS, Contender, prepare
from benchmarks.report import GENERAL, Measurement, machine, machine_line, table
from benchmarks.workloads import workload

KEYS = ("a", "b", "c")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and write the JSON.

    Returns:
        1 if a contender failed, else 0.
    """
    options = parser("python -m benchmarks", __doc__, KEYS).parse_args(arguments)
    end_on_sigterm()
    contenders = chosen(CONTENDERS, options)
    measured = {
        key: _workload(key, contenders, options) for key in sorted(set(options.only or KEYS))
    }
    everything = [one for several in measured.values() for one in several]
    found = machine()
    print(machine_line(found, everything))
    for key, several in measured.items():
        print("\n" + table(workload(key, options.quick), several))
    print("\n" + GENERAL.format(repeats=options.repeat))
    if options.quick:
        print("\nQuick sizes: a smoke test, not a measurement.")
    rows = {
        key: [
            {**asdict(one), "rows_per_second": None if one.error else one.rate(work)}
            for one in several
        ]
        for key, several in measured.items()
        for work in (workload(key, options.quick),)
    }
    print(f"\nWritten: {write(options, found, rows)}")
    return 1 if any(one.error for one in everything) else 0


def _workload(
    key: str, contenders: Sequence[Contender], options: argparse.Namespace
) -> list[Measurement]:
    work = workload(key, options.quick)
    with tempfile.TemporaryDirectory(prefix="vb", dir=options.temp) as folder:
        bench = prepare(work, options.quick, Path(folder))
        contenders = [contender for contender in contenders if key in contender.workloads]
        return measure_all(
            bench, contenders, options.repeat, lambda one: f"{one.rate(work):,.0f} rows/s"
        )


if __name__ == "__main__":
    sys.exit(main())
