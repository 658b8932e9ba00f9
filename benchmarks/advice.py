"""How well the advice of a run foretells its gain.

``python -m benchmarks.advice`` runs ten configurations of a pipeline of three stages, whose models
only sleep. It then runs each with the option that the advice names, and compares the gain with the
predicted one. A run before each of the two starts its workers, except where models take long to
load. Each configuration is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import correlation
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd
from benchmarks.report import machine, row

ROWS, BATCH = 3200, 16


@dataclass(frozen=True)
class Configuration:
    """A pipeline of the stages a, b and c.

    Attributes:
        seconds: Seconds that each model sleeps for a batch.
        workers: Workers of each stage.
        fragment_rows: Rows of a fragment.
        load_seconds: Seconds that each model takes to load.
    """

    seconds: tuple[float, float, float]
    workers: tuple[int, int, int] = (1, 1, 1)
    fragment_rows: int = 160
    load_seconds: tuple[float, float, float] = (0, 0, 0)

    def with_option(self, stages: list[str], option: str) -> Configuration:
        """Follow an advice."""
        if found := re.match(r"concurrency=(\d+)", option):
            workers = zip("abc", self.workers)
            a, b, c = (int(found[1]) if name in stages else n for name, n in workers)
            return replace(self, workers=(a, b, c))
        if found := re.match(r"fragment_rows=(\d+)", option):
            return replace(self, fragment_rows=int(found[1]))
        return self  # the workers are warm now, or no option helps


CONFIGURATIONS = (
    Configuration((0.01, 0.06, 0.01)),
    Configuration((0.08, 0.03, 0.02)),
    Configuration((0.02, 0.03, 0.06)),
    Configuration((0.04, 0.05, 0.01)),
    Configuration((0.03, 0.10, 0.03), (1, 2, 1)),
    Configuration((0.02, 0.09, 0.09), (1, 3, 2)),
    Configuration((0.04, 0.04, 0.04), fragment_rows=1600),
    Configuration((0.03, 0.03, 0.03), fragment_rows=3200),
    Configuration((0.02, 0.03, 0.02), load_seconds=(0, 12, 0)),
    Configuration((0.03, 0.07, 0.02), (2, 1, 1)),
)


class Model:
    """Sleeps when it is constructed, and for each batch."""

    def __init__(self, seconds: float, load_seconds: float) -> None:
        time.sleep(load_seconds)
        self._seconds = seconds

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        time.sleep(self._seconds)
        return {"y": batch["id"]}


class A(Model):
    """The first stage."""


class B(Model):
    """The second stage."""


class C(Model):
    """The third stage."""


def _run(made: Configuration, root: Path) -> dict[str, Any]:
    """Compute all rows, and return the figures of the run."""
    source = vd.parquet(str(root / "source"))
    docs = vd.Pipeline("advice", source=source, id="id", fragment_rows=made.fragment_rows)
    above: Any = docs
    options = zip("abc", (A, B, C), made.seconds, made.load_seconds, made.workers)
    for name, model, seconds, load_seconds, workers in options:
        above = above.map_batches(
            name,
            model,
            schema={"y": "BIGINT"},
            batch_size=BATCH,
            fn_constructor_kwargs={"seconds": seconds, "load_seconds": load_seconds},
            concurrency=vd.Workers(workers, num_cpus=0),
        )
    done = dg.materialize(
        [docs.build_assets()],
        resources={
            "compute": vd.LocalCompute(num_cpus=2),
            "store": vd.FragmentStore(root=str(root / "store")),
        },
        run_config={
            "ops": {"advice_pipeline": {"config": {"force": True}}},
            "loggers": {"console": {"config": {"log_level": "ERROR"}}},
        },
    )
    found = [
        event.step_output_data.metadata
        for event in done.all_events
        if event.event_type == dg.DagsterEventType.STEP_OUTPUT
    ]
    (figures,) = (each["bottleneck"].value for each in found if "bottleneck" in each)
    assert isinstance(figures, dict)
    return figures


def measure(made: Configuration) -> dict[str, Any]:
    """Run a configuration, and again with the option of its advice."""
    with tempfile.TemporaryDirectory(prefix="va") as folder:
        root = Path(folder)
        (root / "source").mkdir()
        pq.write_table(pa.table({"id": range(ROWS)}), root / "source" / "0.parquet")
        if not any(made.load_seconds):
            _run(made, root)
        first = _run(made, root)
        advice = first["advice"]
        changed = made.with_option(advice["pool"]["stages"], advice["option"])
        if changed.workers != made.workers:
            _run(changed, root)
        second = _run(changed, root)
    return {
        "bottleneck": ", ".join(advice["pool"]["stages"]),
        "option": advice["option"].partition(",")[0] or "none",
        "seconds": first["seconds"],
        "seconds with it": second["seconds"],
        "predicted": advice["gain"],
        "measured": first["seconds"] / second["seconds"],
    }


def main() -> None:
    """Measure all configurations, each in a process of its own, and print the gains."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.advice", description=__doc__)
    parser.add_argument("--only", type=int, help="a configuration, by its number from 1")
    only = parser.parse_args().only
    if only is not None:
        print(json.dumps(measure(CONFIGURATIONS[only - 1])))
        return
    found = []
    for number, made in enumerate(CONFIGURATIONS, 1):
        command = [sys.executable, "-m", "benchmarks.advice", "--only", str(number)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        one = json.loads(done.stdout.splitlines()[-1])
        found.append(one)
        if number == 1:
            given = ["ms a batch", "workers", "rows of a fragment"]
            print(row([*given, *one]))
            print(row(["---"] * len([*given, *one])), flush=True)
        given = [
            ", ".join(f"{1000 * each:.0f}" for each in made.seconds),
            ", ".join(map(str, made.workers)),
            str(made.fragment_rows),
        ]
        shown = [f"{each:.2f}" if isinstance(each, float) else each for each in one.values()]
        print(row([*given, *shown]), flush=True)
    r = correlation([one["predicted"] for one in found], [one["measured"] for one in found])
    described = machine()
    print(f"\nr = {r:.3f}; {described['cores']} cores ({described['cpu']})")


if __name__ == "__main__":
    main()
