"""Watch of the cluster's head from the driver, which Ray would otherwise end.

Ray ends a driver a minute after the GCS has stopped answering, in native code, so neither an error
nor a step failure is reported. `outliving_head` gives a connection far more time than that, and
`HeadWatch` fails the run after the minute instead.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from vane_dagster.errors import ClusterLostError

_T = TypeVar("_T")

RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""How long Ray waits for the GCS to restart, in seconds; 60 if it is not set."""
_RECONNECT_SECONDS = 60
_SPARE_SECONDS = 3600
_CAUTION = 0.7
_EVERY_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_SHUTDOWN_SECONDS = 30.0
_RAYLET_ENDED = "Ray's process on this machine (the raylet) has ended"
_CLUSTER_REPLACED = "the Ray cluster has ended, and another cluster responds at its address"

_outlives = False


@contextmanager
def outliving_head() -> Iterator[None]:
    """Keep Ray from ending this process when the head is lost, for connections made inside.

    Ray reads the variable once per process. It is restored, so heads that this process starts do
    not inherit it.
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
    """How long the GCS may be gone, in seconds, to allow for a restart."""
    return float(os.environ.get(RECONNECT) or _RECONNECT_SECONDS)


class HeadWatch:
    """Tracks whether the GCS answers and this machine's Ray node is alive.

    Attributes:
        lost: The error message that says what is lost; empty if nothing is.
    """

    def __init__(
        self, gcs: Any, node: str, limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gcs, self._node, self._limit, self._clock = gcs, node, limit, clock
        self._silent_since: float | None = None
        self._ended = ""
        self._over = threading.Event()
        self.lost = ""

    @classmethod
    def none(cls) -> HeadWatch:
        """Return a watch that finds no loss."""
        return cls(None, "", 0.0)

    @classmethod
    def started(cls) -> HeadWatch:
        """Start watching the cluster that this process is connected to.

        If this module did not prepare the connection, Ray ends the process at the limit, so the
        run is failed before that.
        """
        import ray
        from ray.experimental.internal_kv import internal_kv_get_gcs_client

        if ray.util.client.ray.is_connected():  # each call already contacts its server
            return cls.none()
        limit = reconnect_seconds() * (1.0 if _outlives else _CAUTION)
        node = ray.get_runtime_context().get_node_id()
        watch = cls(internal_kv_get_gcs_client(), node, limit)
        try:
            raylet = _connected_raylet(node, watch.call(ray.nodes))
        except ClusterLostError:
            watch.close()
            raise
        threading.Thread(target=watch._watch, args=[raylet], daemon=True).start()
        return watch

    def _watch(self, raylet: socket.socket | None) -> None:
        """Check every few seconds until the watch is closed."""
        with raylet or nullcontext():
            while not self._over.is_set():
                if _has_ended(raylet, self._over):
                    self._ended = _RAYLET_ENDED
                self.look()

    def check(self) -> None:
        """Raise an error if the head or this machine's node is gone."""
        if not (self.lost or self._over.is_set()):
            self.lost = self._find_loss()
        if self.lost:
            raise ClusterLostError(self.lost)

    def _find_loss(self) -> str:
        """Return the message for a loss; empty if nothing is lost."""
        # Since the first query without an answer: this process may be stopped between queries.
        since = self._silent_since
        silent = 0.0 if since is None else self._clock() - since
        what = self._ended
        if silent > self._limit and not what:
            what = f"the Ray cluster's head (its GCS) has not responded for {silent:.0f} seconds"
        return what and (
            f"{what}: it was stopped or killed, or its machine was lost. Finished parts are kept. "
            "Run again when the cluster is up; a LocalCluster is started by the next run"
        )

    def look(self) -> bool:
        """Query the GCS for live nodes; return whether it has answered."""
        if self._silent_since is None:
            self._silent_since = self._clock()
        try:
            nodes = self._gcs.get_all_node_info(timeout=_ANSWER_SECONDS)
        except Exception as error:  # of several types; Ray may also have been shut down
            if "WrongClusterID" in str(error):
                self._ended = _CLUSTER_REPLACED
            return False
        states = {key.hex(): info.state for key, info in nodes.items()}
        self._silent_since = None
        if states.get(self._node, 0) != 0:
            self._ended = _RAYLET_ENDED
        return True

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function that queries the GCS and would block while the GCS is gone."""
        if self._gcs is None or self._over.is_set():
            return function()
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def body() -> None:
            try:
                # A thread blocked in such a call would keep `ray.shutdown` from returning.
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
        """End the watch, and disconnect from a lost cluster so that another can be used.

        `ray.shutdown` does not return while the GCS hangs, and takes some seconds if it has ended.
        Another run of this process may have reconnected already.
        """
        import ray
        from ray.experimental.internal_kv import internal_kv_get_gcs_client

        self._over.set()
        if self.lost and internal_kv_get_gcs_client() is self._gcs:
            thread = threading.Thread(target=ray.shutdown, daemon=True)
            thread.start()
            thread.join(_SHUTDOWN_SECONDS)


def _connected_raylet(node: str, nodes: Iterable[Mapping[str, Any]]) -> socket.socket | None:
    """An idle connection to this machine's raylet; None if it is not available.

    The connection ends with the raylet, seconds before the GCS notices. By then Ray would have
    ended this process, as it does at the next use of the raylet.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        (path,) = (each["RayletSocketName"] for each in nodes if each["NodeID"] == node)
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


def _has_ended(connection: socket.socket | None, over: threading.Event) -> bool:
    """Wait a few seconds; return at once if the connection has ended."""
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
