"""The four workloads that Ray Data and Daft publish against each other, at a small scale.

Each contender runs two partitions in one process, and a third in another. The first is cold; the
others find warm what the contender keeps. All are timed from the call that starts the
work to its return, without the imports of frameworks; for vane_dagster that is a whole run of
Dagster. Clusters that outlive runs are started before the clock.
"""

from __future__ import annotations

import ast
import io
import os
import sys
import tempfile
import tokenize
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.command import chosen, end_on_sigterm, measure_all, parser, write
from benchmarks.harness import Contender
from benchmarks.media.workloads import MEDIA, Media, prepare
from benchmarks.report import LABELS, Measurement, machine, machine_line, row, spread

CONTENDERS = (
    Contender("raydata", "benchmarks.media.raydata", "ray", serves=True),
    Contender("daft", "benchmarks.media.daft_", "daft"),
    Contender("vane", "benchmarks.media.vane", "vane_dagster", serves=True),
)
CORES = 2
"""Cores of this and all processes that it starts: two workers would leave others idle."""
STEPS = ("cold", "same process", "new process")
HEAD = [
    "contender",
    *(cell for step in STEPS for cell in (f"{step} s", "factor")),
    "whole process s",
    "from nothing s",
    "loads",
    "lines",
]
PIPELINES = Path(__file__).resolve().parent / "pipelines"
NOTE = (
    "Seconds are medians of {repeats} interleaved repeats, in brackets the lowest and the highest. "
    "cold: the first partition, with connecting, workers and loads; a cluster that outlives the "
    "runs is up. same process: the next partition, in the same process. new process: the third, in "
    "a process of its own; whole process: that process, with all imports and its end. The factors "
    "are the seconds of a contender over those of vane_dagster, "
    "the median of the repeats' own. from nothing: the start of the cluster and of the process, "
    "imports, and the cold partition. loads: models that were constructed for all partitions. "
    "lines: those of the contender's file in benchmarks/media/pipelines, formatted to 100 columns, "
    "without blank lines, comments and docstrings, but with imports. All outputs have the expected "
    "rows, and one value in 8 was compared with a plain loop."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and write the JSON.

    Returns:
        1 if a contender failed, else 0.
    """
    options = parser("python -m benchmarks.media", __doc__, tuple(MEDIA)).parse_args(arguments)
    end_on_sigterm()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    contenders = chosen(CONTENDERS, options)
    tables, measured = [], {}
    for key in options.only or MEDIA:
        with tempfile.TemporaryDirectory(prefix="vb", dir=options.temp) as folder:
            bench, rows = prepare(MEDIA[key], options.quick, Path(folder))
            measured[key] = measure_all(bench, contenders, options.repeat, _figures)
        tables.append(table(MEDIA[key], rows, measured[key]))
    everything = [one for several in measured.values() for one in several]
    found = {**machine(), "cores": str(CORES)}
    print(machine_line(found, everything))
    print("\n" + "\n\n".join([*tables, NOTE.format(repeats=options.repeat)]))
    if options.quick:
        print("\nQuick sizes: a smoke test, not a measurement.")
    numbers = {
        key: [{**asdict(one), "lines": lines(key, one.contender)} for one in several]
        for key, several in measured.items()
    }
    print(f"\nWritten: {write(options, found, numbers, 'media-')}")
    return 1 if any(one.error for one in everything) else 0


def _figures(one: Measurement) -> str:
    steps = (f"{step} {seconds:.1f} s" for step, seconds in zip(STEPS, one.seconds))
    return f"{', '.join(steps)}, {one.loads} loads"


def table(media: Media, rows: int, measurements: Sequence[Measurement]) -> str:
    """Return a workload's Markdown table.

    Args:
        media: The workload.
        rows: Rows of a partition's output.
        measurements: The measurements of all contenders and repeats.
    """
    made = [f"### {media.title}, {rows} {media.unit} a partition", "", row(HEAD)]
    made.append(row(["---"] * len(HEAD)))
    for contender in dict.fromkeys(one.contender for one in measurements):
        own = [one for one in measurements if one.contender == contender]
        error = next((one.error for one in own if one.error), "")
        cells = [f"failed: {error}"] if error else _cells(own, measurements)
        blanks = [""] * (len(HEAD) - 2 - len(cells))
        made.append(row([LABELS[contender], *cells, *blanks, str(lines(media.key, contender))]))
    return "\n".join(made)


def _cells(own: Sequence[Measurement], everyone: Sequence[Measurement]) -> list[str]:
    ours = {one.repeat: one for one in everyone if one.contender == "vane" and not one.error}
    cells = []
    for step in range(len(STEPS)):
        ratios = [
            one.seconds[step] / ours[one.repeat].seconds[step] for one in own if one.repeat in ours
        ]
        cells.append(spread([one.seconds[step] for one in own], ".1f"))
        cells.append(f"{median(ratios):.2f}" if ratios else "-")
    cells.append(spread([one.process_seconds[-1] for one in own], ".1f"))
    cells.append(
        spread([one.serving + one.process_seconds[0] - one.seconds[1] for one in own], ".1f")
    )
    return [*cells, "-".join(str(loads) for loads in sorted({one.loads for one in own}))]


def lines(key: str, contender: str) -> int:
    """Count the lines of code of a contender's file.

    Args:
        key: The workload.
        contender: Key of the contender.

    Returns:
        The number of lines with code, which a comment or a docstring is not.
    """
    text = (PIPELINES / f"{key}_{contender}.py").read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
             tokenize.ENDMARKER)  # fmt: skip
    counted: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            counted.update(range(token.start[0], token.end[0] + 1))
    return len(counted - docstrings)


if __name__ == "__main__":
    sys.exit(main())
