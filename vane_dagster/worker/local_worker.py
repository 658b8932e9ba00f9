"""A worker as a subprocess: a host that reads calls from a socket and answers there."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import NoReturn

from vane_dagster._user_errors import contained
from vane_dagster._worker_process import become_worker
from vane_dagster.errors import described
from vane_dagster.servers.directory import directory
from vane_dagster.worker.arrow_files import read_table, write_table
from vane_dagster.worker.calls import AnnounceCall, LoadCall, RunCall, WorkerReply, WorkerRequest
from vane_dagster.worker.host import Host
from vane_dagster.worker.reports import Fault, LoadReport, WorkReport, load_failed

CLOSED_STATUS = 88
"""The exit code of a worker after the user's code has closed its connection."""


class _Channel:
    """The connection to the driver. It ends this process when either end is gone."""

    def __init__(self, connection: Connection, folder: str) -> None:
        self._connection, self._folder = connection, folder
        self._inode = os.fstat(connection.fileno()).st_ino
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def send(self, reply: WorkerReply) -> None:
        with self._lock:
            self._check_is_ours()
            try:
                self._connection.send(reply)
            except OSError:
                self._end()

    def receive(self) -> WorkerRequest:
        self._check_is_ours()
        try:
            request: WorkerRequest = self._connection.recv()
            return request
        except (EOFError, OSError):
            self._end()

    def _check_is_ours(self) -> None:
        """End this process if the descriptor was closed; it may belong to another file now.

        Also end a forked child: the connection belongs to its parent.
        """
        if os.getpid() != self._pid:
            os._exit(1)
        try:
            if os.fstat(self._connection.fileno()).st_ino == self._inode:
                return
        except OSError:
            pass
        os._exit(CLOSED_STATUS)

    def _end(self) -> NoReturn:
        """End this process and its child processes, and delete its Arrow files."""
        self._check_is_ours()
        shutil.rmtree(self._folder, ignore_errors=True)  # the driver can no longer do it

        os.killpg(0, signal.SIGKILL)
        raise AssertionError("unreachable")


def serve(connection: Connection, folder: str, slots: int) -> None:
    """Answer requests until the connection closes."""
    host = Host()
    channel = _Channel(connection, folder)

    def answer(ticket: int, call: LoadCall | RunCall) -> None:
        path = None
        report: WorkReport | LoadReport
        try:
            if isinstance(call, LoadCall):
                report = host.load(call)
            else:
                tables = (read_table(path) for path in call.tables)
                table, report = host.run(
                    call.work, *tables, record=lambda rows: channel.send((ticket, rows, None))
                )
                path = None if table is None else write_table(table, folder)
        except BaseException as error:  # the driver waits for an answer in any case
            error = contained(error)
            fault = Fault("ComputeError", f"worker {os.getpid()}: {described(error)}")
            report = load_failed(fault) if isinstance(call, LoadCall) else WorkReport(fault=fault)
        channel.send((ticket, report, path))

    with ThreadPoolExecutor(max_workers=slots) as threads:
        while True:
            ticket, call = channel.receive()
            if call == "status":  # answered while the worker works
                channel.send((ticket, host.status(), None))
            elif call == "stop":
                if host.server is not None:
                    host.server.stop()
                os.killpg(0, signal.SIGKILL)
            elif isinstance(call, AnnounceCall):
                directory.update(call.endpoints)
            else:
                threads.submit(answer, ticket, call)


def main() -> None:
    """Serve the driver at the other end of the socket given on the command line."""
    become_worker()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    serve(Connection(descriptor), sys.argv[2], int(sys.argv[3]))


if __name__ == "__main__":
    main()
