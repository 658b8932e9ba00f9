"""Starts each contender in its own processes, one after the other, and checks their output.

Repeats are interleaved, and each begins with another contender (A B C D, B C D A), so a noisy
machine affects all contenders equally.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.check import Fingerprint, fingerprint, tolerance
from benchmarks.job import Job, Result, Step
from benchmarks.report import LABELS, Measurement
from benchmarks.workloads import MARKS, MiniLM, Workload, generate
from vane_dagster.errors import VaneError

ROOT = Path(__file__).resolve().parent.parent
PROCESS_SECONDS = 600
# Linux rejects longer socket paths; Ray adds about 65 characters to the folder it is given.
SOCKET_PATH, RAY_TAIL = 107, 65


class BenchmarkError(VaneError):
    """A contender cannot be measured, or its output is wrong."""


@dataclass(frozen=True)
class Contender:
    """How to start a contender's processes.

    Args:
        key: Key of `LABELS`.
        module: Full name of the module that runs it.
        package: Package that must be importable.
        python: The interpreter that runs it.
        serves: Whether it needs a cluster that outlives its processes.
        living: Whether one process runs all steps even if each step normally has its own process.
        workloads: The workloads that it runs.
    """

    key: str
    module: str
    package: str
    python: str = sys.executable
    serves: bool = False
    living: bool = False
    workloads: tuple[str, ...] = ("a", "b", "c")


CONTENDERS = (
    Contender("bare", "benchmarks.contenders.bare", "pyarrow", living=True),
    Contender("raydata", "benchmarks.contenders.raydata", "ray", serves=True),
    Contender(
        "raydata_function",
        "benchmarks.contenders.raydata_function",
        "ray",
        serves=True,
        workloads=("c",),
    ),
    Contender("daft", "benchmarks.contenders.daft_", "daft"),
    Contender("vane", "benchmarks.contenders.vane", "vane_dagster", serves=True),
    Contender(
        "vane_keys",
        "benchmarks.contenders.vane_keys",
        "vane_dagster",
        serves=True,
        workloads=("c",),
    ),
)


@dataclass(frozen=True)
class Bench:
    """One workload on one machine: its input and its expected output.

    Args:
        key: Key of the workload.
        quick: Whether it has the sizes of the smoke test.
        folder: A short folder of its own.
        partitions: The folders of input.
        differences: Describes how the files of an output differ from a partition's expected one.
        passes: Steps over the same input in one process.
        steps_per_process: How many steps a process runs, in order; None for all in one.
    """

    key: str
    quick: bool
    folder: Path
    partitions: Sequence[Path]
    differences: Callable[[str, Sequence[Path]], list[str]] = field(repr=False)
    passes: int = 1
    steps_per_process: int | None = None


def prepare(work: Workload, quick: bool, folder: Path) -> Bench:
    """Write the input and compute the expected output.

    Args:
        work: The workload.
        quick: Whether it has the sizes of the smoke test.
        folder: The folder to write to.
    """
    partitions = generate(work, folder / "in")
    marks = folder / "reference"
    marks.mkdir()
    udf = MiniLM(str(marks)) if work.key == "a" else None
    expected = {part.name: _reference(work, part, udf, folder) for part in partitions}

    def differences(name: str, paths: Sequence[Path]) -> list[str]:
        return expected[name].differences(fingerprint(paths), tolerance(work))

    steps = 1 if work.process_per_step else None
    return Bench(work.key, quick, folder, partitions, differences, work.passes, steps)


def _reference(work: Workload, partition: Path, udf: MiniLM | None, folder: Path) -> Fingerprint:
    """Compute a partition's output in the plainest way, without the UDFs where possible."""
    written = []
    for path in sorted(partition.glob("*.parquet")):
        source = pq.read_table(path)
        if udf is not None:
            added = pa.chunked_array([udf.compute(source["text"].combine_chunks())])
        elif work.key == "b":
            added = pa.chunked_array([source["x"].to_numpy() * np.float32(2)])
        else:
            added = pa.chunked_array([source["f0"].to_numpy() + source["f1"].to_numpy()])
        written.append(folder / "reference" / f"{partition.name}-{path.name}")
        pq.write_table(source.select(work.keeps).append_column(work.adds, added), written[-1])
    found = fingerprint(written)
    for path in written:
        path.unlink()
    return found


def measure(bench: Bench, contender: Contender, repeat: int) -> Measurement:
    """Run a contender once and verify all of its output.

    Args:
        bench: The workload with its input.
        contender: The contender.
        repeat: Number of the repeat.
    """
    folder = bench.folder / "w"
    try:
        return _measure(bench, contender, repeat, folder)
    except BenchmarkError as error:
        return Measurement(contender.key, repeat, error=str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(bench: Bench, contender: Contender, repeat: int, folder: Path) -> Measurement:
    if shutil.which(contender.python) is None:
        raise BenchmarkError(
            f"{LABELS[contender.key]}: the interpreter {contender.python!r} does not exist or "
            "cannot be run; pass one that has the contender installed"
        )
    if contender.python == sys.executable and not importlib.util.find_spec(contender.package):
        raise BenchmarkError(
            f"{LABELS[contender.key]}: package {contender.package!r} is not installed; "
            f"install it, or pass --skip {contender.key}"
        )
    job = _job(bench, contender, folder)
    environment = {**process_environment(contender), MARKS: job.marks}
    with contextlib.ExitStack() as stack:
        start = time.perf_counter()
        if contender.serves:
            service = stack.enter_context(running_cluster(contender, job, environment, folder))
            job = replace(job, service=service)
        serving = time.perf_counter() - start
        count = None if contender.living else bench.steps_per_process
        results, process_seconds = [], []
        for first in range(0, len(job.steps), count or len(job.steps)):
            steps = tuple(job.steps[first : first + (count or len(job.steps))])
            start = time.perf_counter()
            results.append(run_process(contender, replace(job, steps=steps), environment, folder))
            process_seconds.append(time.perf_counter() - start)
    outputs = [glob for result in results for glob in result.outputs]
    verify(bench, contender, job.steps, outputs)
    return Measurement(
        contender.key,
        repeat,
        process_seconds,
        [seconds for result in results for seconds in result.seconds],
        len(list(Path(job.marks).iterdir())),
        results[0].versions,
        [result.notes for result in results if result.notes],
        serving=serving,
    )


def _job(bench: Bench, contender: Contender, folder: Path) -> Job:
    marks, temp = folder / "m", folder / "t"
    if contender.serves and len(str(temp)) > SOCKET_PATH - RAY_TAIL:
        raise BenchmarkError(
            f"{LABELS[contender.key]}: the temporary folder {str(temp)!r} is too long for Ray's "
            f"sockets; expected at most {SOCKET_PATH - RAY_TAIL} characters: pass a shorter --temp"
        )
    steps = []
    for number in range(bench.passes):
        for partition in bench.partitions:
            out = folder / "o" / str(number) / partition.name
            out.mkdir(parents=True)
            steps.append(Step(partition.name, str(partition), str(out)))
    marks.mkdir()
    temp.mkdir()
    return Job(contender.module, bench.key, bench.quick, tuple(steps), str(marks), str(temp))


def process_environment(contender: Contender) -> dict[str, str]:
    """Return the environment of the processes: no hub, no telemetry, and only their own cluster."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    closed = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {
        **inherited,
        # vane_dagster closes its cluster itself.
        **({} if contender.package == "vane_dagster" else closed),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DAFT_PROGRESS_BAR": "0",
        "DAFT_ANALYTICS_ENABLED": "0",
        "DO_NOT_TRACK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


@contextlib.contextmanager
def running_cluster(
    contender: Contender, job: Job, environment: Mapping[str, str], folder: Path
) -> Iterator[dict[str, str]]:
    """Keep a contender's cluster running as long as its processes need it."""
    with (folder / "serve.log").open("w+") as log:
        process, answer = _start(contender, "serve", job, environment, folder, log)
        try:
            deadline = time.monotonic() + PROCESS_SECONDS
            while not answer.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise BenchmarkError(_failure(contender, "its cluster did not start", log))
                time.sleep(0.05)
            yield json.loads(answer.read_text())
        finally:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            _finish(process, 60)


def run_process(
    contender: Contender,
    job: Job,
    environment: Mapping[str, str],
    folder: Path,
    limit: float = PROCESS_SECONDS,
) -> Result:
    """Run a job's steps in a process of the contender's.

    Args:
        contender: The contender.
        job: The steps.
        environment: What `process_environment` returned.
        folder: A folder for the log and the answer.
        limit: Seconds after which the process is killed.
    """
    with (folder / "run.log").open("w+") as log:
        process, answer = _start(contender, "run", job, environment, folder, log)
        code = _finish(process, limit)
        if code != 0 or not answer.exists():
            raise BenchmarkError(_failure(contender, f"its process ended with code {code}", log))
    return Result(**json.loads(answer.read_text()))


def _start(
    contender: Contender,
    role: str,
    job: Job,
    environment: Mapping[str, str],
    folder: Path,
    log: IO[str],
) -> tuple[subprocess.Popen[bytes], Path]:
    job_path, answer = folder / f"{role}.json", folder / f"{role}.answer"
    answer.unlink(missing_ok=True)
    job.dump(job_path)
    command = [contender.python, "-m", "benchmarks.worker", role, str(job_path), str(answer)]
    process = subprocess.Popen(
        command,
        env=dict(environment),
        cwd=folder,
        stdin=subprocess.PIPE if role == "serve" else subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return process, answer


def _finish(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for a process; kill its group if it takes too long or this process is interrupted."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _failure(contender: Contender, what: str, log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return f"{LABELS[contender.key]}: {what}; last line: {lines[-1] if lines else 'none'}"


def verify(
    bench: Bench, contender: Contender, steps: Sequence[Step], outputs: Sequence[str]
) -> None:
    """Compare every step's output with the expected output.

    Args:
        bench: The workload with its expected output.
        contender: The contender.
        steps: The executed steps.
        outputs: For each step, a glob of its output files; the step's out folder if empty.

    Raises:
        BenchmarkError: If rows, ids, columns or checksums differ.
    """
    for number, step in enumerate(steps):
        out = Path(step.out)
        paths = sorted(out.glob(outputs[number]) if outputs else out.rglob("*.parquet"))
        found = bench.differences(step.name, paths)
        if found:
            raise BenchmarkError(
                f"{LABELS[contender.key]}: wrong output in step {number} ({step.name}): "
                + "; ".join(found)
            )
