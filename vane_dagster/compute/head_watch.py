"""The cluster's head, watched from the driver, which Ray ends when the head is gone.

Ray ends a driver a minute after the GCS has stopped to answer, in native code, so that neither an
error nor a step failure is reported. `outliving_head` gives a connection far more time than that,
and `HeadWatch` fails the run after the minute instead.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from vane_dagster.errors import ClusterLostError

_T = TypeVar("_T")

RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""How long Ray waits for a GCS that is started again, in seconds; 60 if it is not set."""
_RECONNECT_SECONDS = 60
_SPARE_SECONDS = 3600
_CAUTION = 0.7
_EVERY_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_SUSPECTED_SECONDS = 10.0
_SHUTDOWN_SECONDS = 30.0

_outlives = False


@contextmanager
def outliving_head() -> Iterator[None]:
    """Has Ray not end this process when the head of a cluster is gone that is connected to inside.

    Ray reads the variable once for a process. It is restored, so that no head that this process
    starts takes it over.
    """
    global _outlives
    raylet: Any = importlib.import_module("ray._raylet")
    before = os.environ.get(RECONNECT)
    os.environ[RECONNECT] = str(int(reconnect_seconds() + _SPARE_SECONDS))
    try:
        raylet.Config.initialize("")
        yield
        _outlives = True
    finally:
        del os.environ[RECONNECT]
        if before is not None:
            os.environ[RECONNECT] = before


def reconnect_seconds() -> float:
    """How long a GCS may be gone, so that it can be started again."""
    return float(os.environ.get(RECONNECT) or _RECONNECT_SECONDS)


class HeadWatch:
    """Knows whether the GCS answers and this machine's Ray node lives.

    Args:
        gcs: Ray's client of the GCS; None for one that is not watched, as with Ray Client.
        node: The id of this machine's Ray node.
        limit: Seconds for which the GCS may be silent, so that it can be started again.
        clock: Seconds that only grow.

    Attributes:
        lost: What is gone, as the message of an error; empty if nothing is.
    """

    def __init__(
        self, gcs: Any, node: str, limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gcs, self._node, self._limit, self._clock = gcs, node, limit, clock
        self._answered = clock()
        self._node_is_dead = False
        self._suspected: float | None = None
        self._over = threading.Event()
        self.lost = ""

    @classmethod
    def started(cls) -> HeadWatch:
        """Start to watch the cluster that this process is connected to.

        Where this module did not prepare the connection, Ray ends the process at the limit, so the
        run is failed before that.
        """
        import ray
        from ray.experimental.internal_kv import internal_kv_get_gcs_client

        if ray.util.client.ray.is_connected():  # its server is asked by each call
            return cls(None, "", 0.0)
        limit = reconnect_seconds() * (1.0 if _outlives else _CAUTION)
        node = ray.get_runtime_context().get_node_id()
        watch = cls(internal_kv_get_gcs_client(), node, limit)
        own = weakref.ref(watch)
        given = (own, watch._over, _connected_raylet())
        threading.Thread(target=_watch, args=given, daemon=True).start()
        return watch

    def check(self) -> None:
        """Raise an error if the head or this machine's node is gone.

        Raises:
            ClusterLostError: If it is.
        """
        if not (self.lost or self._over.is_set()):
            self.lost = self._verdict()
        if self.lost:
            raise ClusterLostError(self.lost)

    def _verdict(self) -> str:
        """What is gone, as the message of an error; empty if nothing is."""
        now = self._clock()
        silent = now - self._answered
        if silent <= self._limit / 2:
            self._suspected = None
        elif self._suspected is None:
            self._suspected = now
        # The GCS may not have been asked at all, where this process was stopped for a while.
        suspected = 0.0 if self._suspected is None else now - self._suspected
        if self._gcs is None:
            return ""
        if self._node_is_dead:
            what = "Ray's process on this machine (the raylet) is gone"
        elif silent > self._limit and suspected >= min(_SUSPECTED_SECONDS, self._limit / 3):
            what = f"the Ray cluster's head (its GCS) has not answered for {silent:.0f} seconds"
        else:
            return ""
        return (
            f"{what}: it was stopped or killed, or its machine was lost. Finished parts are kept. "
            "Run again when the cluster is up; a LocalCluster is started by the next run"
        )

    def node_died(self) -> None:
        """Take in that this machine's raylet has ended."""
        self._node_is_dead = True

    def look(self) -> bool:
        """Ask the GCS which nodes live; return whether it has answered."""
        try:
            nodes = self._gcs.get_all_node_info(timeout=_ANSWER_SECONDS)
        except Exception:  # of several kinds; Ray may have been shut down too
            return False
        states = {key.hex(): info.state for key, info in nodes.items()}
        self._answered = self._clock()
        self._node_is_dead |= states.get(self._node, 0) != 0
        return True

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function that asks the GCS, and would block for as long as that is gone.

        Raises:
            ClusterLostError: If it is gone for too long.
        """
        if self._gcs is None:
            return function()
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def body() -> None:
            try:
                # A thread that is blocked in such a call would keep `ray.shutdown` from ending.
                while not self.look():
                    self.check()
                    time.sleep(_LOOK_SECONDS / 5)
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=body, daemon=True).start()
        while not concurrent.futures.wait([answer], timeout=_LOOK_SECONDS).done:
            self.check()
        return answer.result()

    def close(self) -> None:
        """End the watch, and disconnect from a cluster that is gone, to use another."""
        self._over.set()
        if self.lost:
            import ray

            # It waits for the GCS for some seconds.
            ending = threading.Thread(target=ray.shutdown, daemon=True)
            ending.start()
            ending.join(_SHUTDOWN_SECONDS)


def _watch(
    own: weakref.ref[HeadWatch], over: threading.Event, raylet: socket.socket | None
) -> None:
    """Looks every few seconds, for as long as there is a watch."""
    with raylet or nullcontext():
        while not over.is_set():
            ended = _has_ended(raylet, over)
            if (watch := own()) is None:
                return
            if ended:
                watch.node_died()
            watch.look()
            del watch


def _connected_raylet() -> socket.socket | None:
    """A connection to this machine's raylet on which nothing is said; None if it can't be had.

    When the raylet ends, so does the connection, seconds before the GCS takes note. By then Ray has
    ended this process, as it does at the next use of the raylet.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(worker.global_worker.node.raylet_socket_name)
    except OSError:
        connection.close()
        return None
    return connection


def _has_ended(connection: socket.socket | None, over: threading.Event) -> bool:
    """Waits a few seconds; returns at once if the connection has ended."""
    if connection is None:
        over.wait(_EVERY_SECONDS)
        return False
    connection.settimeout(_EVERY_SECONDS)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
