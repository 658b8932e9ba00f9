"""`python -m definitions.demo`: materializes partitions through Dagster, and reports the work."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from definitions.settings import PARTITIONS, check_extra, data_folder, project_folder
from vane_dagster.errors import DefinitionError, UdfError, VaneError, names

MODEL_STAGE = "embedding"
LAST_STAGE = "published"
QUESTION = "parse a date from a string"


@dataclass(frozen=True)
class Outcome:
    """What one run did to one partition; `computed` counts the rows that the model embedded."""

    partition: str
    seconds: float
    rows: int
    computed: int
    loads: int
    warm: int
    rows_per_second: float | None

    @staticmethod
    def parse(line: str) -> Outcome | None:
        """Reads a line of `definitions.run`; None where the run failed."""
        found = json.loads(line)
        if not found["success"]:
            return None
        stages: Mapping[str, Mapping[str, Any]] = found["stages"]
        model = stages[MODEL_STAGE]
        return Outcome(
            partition=found["partition"],
            seconds=found["seconds"],
            rows=stages[LAST_STAGE]["dagster/partition_row_count"],
            computed=model["rows_computed"],
            loads=model.get("model_loads", 0),
            warm=model.get("warm_hits", 0),
            rows_per_second=model.get("rows_per_second"),
        )

    def __str__(self) -> str:
        said = f"  {self.partition:<12}{self.rows:>5} rows in {self.seconds:5.1f} s: "
        if not self.computed:
            return said + "up to date"
        model = "the model was loaded" if self.loads else "the model was warm"
        speed = "" if self.rows_per_second is None else f", {self.rows_per_second:.0f} rows/s"
        return f"{said}{model}, {self.computed} rows embedded{speed}"


def run_demo(partitions: Sequence[str]) -> None:
    """Materialize partitions and print, in plain words, the work that this took.

    Partitions that are published already are checked again together, in one process. A new one
    runs in a process of its own, as Dagster launches runs. It finds the model warm only because
    the pool outlives processes.

    Raises:
        DefinitionError: If a partition is unknown.
        UdfError: If a run fails; the message names its log.
    """
    _check(partitions)
    started = time.perf_counter()
    folder = data_folder()
    old = [p for p in partitions if any((folder / "published" / p).glob("*.parquet"))]
    processes = [*([old] if old else []), *([p] for p in partitions if p not in old)]
    _say(
        f"Semantic search over the documentation of Python {sys.version_info.major}."
        f"{sys.version_info.minor}: packages {', '.join(partitions)}."
    )
    _say(f"Data, runs and logs are in {folder}.")
    if len(old) < len(partitions):
        _say("Each new partition is a Dagster run in a process of its own; the first of all starts")
        _say("a local Ray head and loads the model.")
    _say("")
    outcomes = []
    for process in processes:
        for outcome in _materialize(process, folder):
            _say(str(outcome))
            outcomes.append(outcome)
    _summarize(outcomes, len(processes), time.perf_counter() - started)


def _check(partitions: Sequence[str]) -> None:
    unknown = [p for p in partitions if p not in PARTITIONS]
    if unknown or not partitions:
        raise DefinitionError(
            f"the demo has no partition {names(unknown)}; expected some of {', '.join(PARTITIONS)}"
        )


def _materialize(partitions: Sequence[str], folder: Path) -> Iterator[Outcome]:
    """Run partitions in one process and yield the outcome of each as it arrives."""
    home = folder / "dagster"
    home.mkdir(parents=True, exist_ok=True)
    shutil.copy(project_folder() / "definitions" / "dagster.yaml", home)
    log = folder / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{partitions[0]}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "VANE_DEMO_DATA": str(folder),
    }
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "definitions.run", *partitions],
            cwd=project_folder(),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            outcome = Outcome.parse(line)
            if outcome is not None:
                yield outcome
    if process.returncode:
        tail = "".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[-15:])
        raise UdfError(
            f"a run of {', '.join(partitions)} failed; correct the cause and run the demo again, "
            f"which keeps what is done. All of its log is in {log}, the end is:\n{tail}"
        )


def _summarize(outcomes: Sequence[Outcome], processes: int, seconds: float) -> None:
    rows = sum(outcome.rows for outcome in outcomes)
    computed = sum(outcome.computed for outcome in outcomes)
    whole = f"{_count(len(outcomes), 'partition')}, {_count(rows, 'row')}"
    if not computed:
        _say(f"\nNothing needed computing: {whole} were there.")
        _say(f"That took {seconds:.1f} s.")
        return
    loads = sum(outcome.loads for outcome in outcomes)
    warm = sum(outcome.warm for outcome in outcomes)
    _say(
        f"\n{whole} in {_count(processes, 'process', 'es')} and {seconds:.1f} s: "
        f"{_count(loads, 'model load')}, {_count(warm, 'warm hit')}, "
        f"{computed} rows embedded."
    )


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else plural}"


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Embed the standard library's documentation, and answer one question."""
    parser = argparse.ArgumentParser(prog="python -m definitions.demo", description=main.__doc__)
    parser.add_argument(
        "--partitions",
        default="datetime,json,pathlib,shutil",
        help="packages of the standard library, separated by commas (default: %(default)s)",
    )
    given = parser.parse_args().partitions.split(",")
    try:
        check_extra()
        run_demo([name.strip() for name in given if name.strip()])
        from definitions.search import search, show

        _say(f'\nThe question "{QUESTION}":\n')
        show(search(QUESTION, 5))
    except VaneError as error:
        sys.exit(f"Error: {error}")
    places = sys.executable, sys.prefix, data_folder()
    python, venv, data = (os.path.relpath(place) for place in places)
    given = "" if data == "data" else f"VANE_DEMO_DATA={data_folder()} "
    options = "" if venv == ".venv" else f" VENV={venv}"
    options += f" DATA={data_folder()}" if given else ""
    _say("\nNext:")
    _say(f'  {given}{python} -m definitions.search "..."  asks your own question')
    _say(f"  make ui{options}  shows the assets and these runs in Dagster")
    _say(f"  {python} -m vane_dagster cluster stop  unloads the model")


if __name__ == "__main__":
    main()
