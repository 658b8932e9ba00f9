"""A server used outside of runs: from a notebook, a script or a web application."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import NoneType
from typing import ClassVar

from vane_dagster._keywords import known_keywords
from vane_dagster.compute.api import Lease
from vane_dagster.engine.server_pools import server_pool
from vane_dagster.engine.worker_group import WorkerGroup
from vane_dagster.errors import DefinitionError, VaneError, described
from vane_dagster.events import Event, Noticed, Printed
from vane_dagster.orchestration.resources import Compute, RayCompute
from vane_dagster.pipeline.servers import ModelServer, servers_by_key
from vane_dagster.servers.directory import directory
from vane_dagster.servers.handle import ServerHandle
from vane_dagster.servers.launch import Endpoint
from vane_dagster.worker.protocol import PoolSpec

_TICK_SECONDS = 0.2
_log = logging.getLogger(__name__)


@known_keywords("vd.serve")
@contextmanager
def serve(server: ModelServer, compute: Compute | None = None) -> Iterator[ServerHandle]:
    """Use a server of pipelines outside of runs; it is started unless it is warm.

    It is the same server that pipelines with the same declaration use, with the same replicas. They
    stay up for their idle time afterwards. Inside of the block the server's attributes are those of
    a replica that answers, also after one has moved: read ``llm.url`` for each request, or use
    ``llm.request()``.

    Args:
        server: The server.
        compute: Where it runs. Default: ``RayCompute()``, the local cluster. With `LocalCompute` it
            ends with the block.

    Yields:
        The server, with ``url``, ``grpc_url``, ``model``, ``api_key`` and ``headers``.

    Raises:
        ComputeError: If no cluster can be reached, or it cannot hold the server.
        DefinitionError: If an argument has another type, or another one of its name is used that
            differs only in code.
        ModelLoadError: If it does not start; with the last lines of its log.
    """
    if not isinstance(server, ModelServer):
        raise DefinitionError(f"vd.serve was given {server!r}; expected a server, as vd.VLLMServer")
    if not isinstance(compute, (Compute, NoneType)):
        raise DefinitionError(f"vd.serve: compute is {compute!r}; expected one, as vd.RayCompute()")
    with ExitStack() as stack:
        chosen = compute or RayCompute()
        backend = chosen.backend(_log.warning)
        stack.callback(chosen.close, backend)
        pool = server_pool(server, backend.capacity())
        run_id = f"serve-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        lease = backend.lease(run_id, [pool])
        stack.callback(lease.release)
        served = stack.enter_context(_Served(server, pool, lease))
        served.wait_until_ready()
        yield server.handle


class _Served:
    """A leased server, followed by a thread of its own, which alone calls the lease.

    Blocks of one process that use the same server have the endpoints of all of them.
    """

    _lock = threading.Lock()
    _in_use: ClassVar[list[_Served]] = []

    def __init__(self, server: ModelServer, pool: PoolSpec, lease: Lease) -> None:
        self._server, self._pool, self._lease = server, pool, lease
        self._settled = threading.Event()
        self._over = threading.Event()
        self._error: Exception | None = None
        self._endpoints: Sequence[Endpoint] = ()
        self._thread = threading.Thread(target=self._follow, name="vane-serve", daemon=True)

    def __enter__(self) -> _Served:
        with self._lock:
            servers_by_key([self._server, *(other._server for other in self._in_use)])
            self._in_use.append(self)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()
        with self._lock:
            self._in_use.remove(self)
        self._announce([])

    def _announce(self, endpoints: Sequence[Endpoint]) -> None:
        """Let this process know the endpoints of this block, beside those of others."""
        self._endpoints, key = endpoints, self._server.key
        with self._lock:
            if same := [block for block in self._in_use if block._server.key == key]:
                directory.update({key: list(dict.fromkeys(e for b in same for e in b._endpoints))})
            else:
                directory.forget(key)

    def wait_until_ready(self) -> None:
        """Return when all replicas have started, and one of them is up.

        Raises:
            Exception: If they cannot be started.
        """
        self._settled.wait()
        if self._error is not None:
            raise self._error

    def _follow(self) -> None:
        try:
            identity = self._pool.identity
            group = WorkerGroup(
                self._lease,
                {},
                _tell,
                lambda *ready: None,
                _give_up,
                servers={identity: self._pool},
            )
            while not self._over.is_set():
                self._announce(group.endpoints(identity))
                if self._endpoints and not group.worker_queues[identity].loading:
                    self._settled.set()
                for done in self._lease.wait(_TICK_SECONDS):
                    group.handle_done(done)
                group.check_starts()
        except Exception as error:
            self._error = error
            _log.error("%s", described(error))
        finally:
            self._announce([])
            self._settled.set()


def _tell(event: Event) -> None:
    if isinstance(event, (Noticed, Printed)):
        _log.warning(event.text)


def _give_up(stages: Sequence[str], error: VaneError) -> None:
    raise error
