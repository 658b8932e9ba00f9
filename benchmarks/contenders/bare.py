"""The baseline: two spawned processes, each with its UDF, reading and writing with pyarrow."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.job import Job, Result, Step
from benchmarks.workloads import workload


def run(job: Job) -> Result:
    """Send each step to the two processes, which live as long as this one."""
    seconds = []
    start = time.perf_counter()
    with _processes(job) as connections:
        for step in job.steps:
            for connection in connections:
                connection.send(step)
            for connection in connections:
                connection.recv()
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
    return Result(seconds, {"pyarrow": pa.__version__})


@contextmanager
def _processes(job: Job) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    connections, processes = [], []
    try:
        for index in range(workload(job.workload, job.quick).workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_loop, args=(theirs, index, job), daemon=True)
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        yield connections
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join()


def _loop(connection: Connection, index: int, job: Job) -> None:
    work = workload(job.workload, job.quick)
    udf = work.udf(**work.udf_kwargs(job.marks))
    while True:
        try:
            step: Step = connection.recv()
        except EOFError:
            return
        for path in sorted(Path(step.source).glob("*.parquet"))[index :: work.workers]:
            table = pq.read_table(path)
            starts = range(0, table.num_rows, work.batch_size)
            batches = [udf(table.slice(start, work.batch_size)) for start in starts]
            pq.write_table(pa.concat_tables(batches), Path(step.out, path.name))
        connection.send(True)
