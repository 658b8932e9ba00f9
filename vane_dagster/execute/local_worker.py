"""A worker as a subprocess: a host that reads calls from a socket and answers there."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

from vane_dagster.execute.backend import load_failed
from vane_dagster.execute.host import Host
from vane_dagster.execute.work import Fault, Report


def serve(connection: Connection, folder: str, slots: int) -> None:
    """Answers (ticket, method, arguments) with (ticket, report, path of the table's file)."""
    host = Host()
    lock = threading.Lock()

    def answer(ticket: int, method: str, args: tuple[Any, ...]) -> None:
        path = None
        report: Any
        try:
            if method == "load":
                report = host.load(*args)
            else:
                work, *paths = args
                table, report = host.run(work, *(read_table(p) for p in paths))
                path = None if table is None else write_table(table, folder)
        except BaseException as error:  # the driver waits for an answer, whatever was raised
            fault = Fault("ComputeError", f"worker {os.getpid()}: {type(error).__name__}: {error}")
            report = load_failed(fault) if method == "load" else Report(fault=fault)
        with lock:
            connection.send((ticket, report, path))

    with ThreadPoolExecutor(max_workers=slots) as threads:
        while True:
            try:
                call = connection.recv()
            except (EOFError, OSError):  # the driver is gone
                _end(folder)
            if call[1] == "starting":  # asked while the model is constructed
                with lock:
                    connection.send((call[0], host.startup.told(), None))
                continue
            threads.submit(answer, *call)


def _end(folder: str) -> None:
    """Ends this process and what the user's code has started, and leaves nothing in memory."""
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def write_table(table: pa.Table, folder: str) -> str:
    """Writes a table as an Arrow file that others map into memory; gives its path."""
    path = os.path.join(folder, f"{uuid.uuid4().hex}.arrow")
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    return path


def read_table(path: str) -> pa.Table:
    """Maps a table into memory."""
    with pa.memory_map(path) as source:
        return pa.ipc.open_file(source).read_all()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = socket.socket(fileno=int(sys.argv[1]))
    serve(Connection(own.detach()), sys.argv[2], int(sys.argv[3]))
