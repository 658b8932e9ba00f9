"""What the benchmarks that compare contenders share on the command line."""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness import Bench, Contender, measure
from benchmarks.report import LABELS, Measurement

T = TypeVar("T")
RESULTS = Path(__file__).resolve().parent / "results"


def parser(prog: str, description: str | None, keys: Sequence[str]) -> argparse.ArgumentParser:
    """Return the options of every such benchmark.

    Args:
        prog: The command.
        description: The text of its help.
        keys: The workloads.
    """
    made = argparse.ArgumentParser(prog=prog, description=description)
    made.add_argument("--only", action="append", choices=tuple(keys), help="one of them")
    made.add_argument("--repeat", type=_repeats, default=3, help="repeats (default 3)")
    made.add_argument("--skip", action="append", default=[], choices=tuple(LABELS))
    made.add_argument("--quick", action="store_true", help="tiny sizes: a smoke test")
    made.add_argument(
        "--daft-python",
        default=sys.executable,
        help="interpreter with Daft, where its pyarrow pin does not fit this environment",
    )
    made.add_argument("--temp", type=Path, help="a short folder for temporary files")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    return made


def _repeats(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def end_on_sigterm() -> None:
    """Raise an exception on SIGTERM, so that clusters are stopped and folders removed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def chosen(contenders: Sequence[Contender], options: argparse.Namespace) -> list[Contender]:
    """Return the contenders to measure, each with its interpreter.

    Args:
        contenders: All contenders.
        options: The parsed command line.
    """
    return [
        replace(contender, python=options.daft_python) if contender.package == "daft" else contender
        for contender in contenders
        if contender.key not in options.skip
    ]


def measure_all(
    bench: Bench,
    contenders: Sequence[Contender],
    repeats: int,
    describe: Callable[[Measurement], str],
) -> list[Measurement]:
    """Measure the contenders in turns, and print a line for each to standard error.

    Args:
        bench: The workload with its input.
        contenders: The contenders.
        repeats: Number of repeats.
        describe: The figure of a measurement without an error.
    """
    measured = []
    for repeat, contender in turns(contenders, repeats):
        start = time.perf_counter()
        measured.append(measure(bench, contender, repeat))
        took = time.perf_counter() - start
        state = measured[-1].error or describe(measured[-1])
        label = f"({bench.key}) repeat {repeat + 1} {LABELS[contender.key]}"
        print(f"{label}: {state} [{took:.0f} s]", file=sys.stderr, flush=True)
    return measured


def turns(contenders: Sequence[T], repeats: int) -> list[tuple[int, T]]:
    """Return the contenders of all repeats, each of which begins with another one."""
    count = len(contenders)
    places = itertools.product(range(repeats), range(count))
    return [(repeat, contenders[(repeat + place) % count]) for repeat, place in places]


def write(
    options: argparse.Namespace,
    found: Mapping[str, str],
    workloads: Mapping[str, Sequence[Mapping[str, Any]]],
    name: str = "",
) -> Path:
    """Write the numbers as JSON.

    Args:
        options: The parsed command line.
        found: The machine.
        workloads: The measurements of each workload.
        name: What the file's name begins with.

    Returns:
        The file.
    """
    results: Path = options.results
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name}{time.strftime('%Y%m%d-%H%M%S')}.json"
    content = {
        "machine": found,
        "quick": options.quick,
        "repeats": options.repeat,
        "workloads": workloads,
    }
    path.write_text(json.dumps(content, indent=1))
    return path
