"""Servers as the code that calls them sees them: `ServerHandle`, and maps of hosts to URLs."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from vane_dagster.servers.directory import directory
from vane_dagster.servers.launch import Endpoint

VLLM = "vLLM server"
"""The kind of a `vd.VLLMServer`."""


class ServerHandle:
    """A server that a function or class was given as an argument.

    Its attributes are those of one ready replica: on the worker's own node if there is one. A
    worker uses the same replica as long as that one answers, so a URL may be kept: a server that is
    restarted has the same one. Workers whose class was constructed with the URL of a replica that
    is gone are replaced.

    Attributes:
        key: Identifies the server to workers.
        kind: Its kind, for people.
        keyed: What counts in fragment keys; only where the server is declared.
        command: Its command line; only where the server is declared.
    """

    kind: str = "server"
    keyed: Any = None
    command: Sequence[Any] = ()

    def __init__(self, key: str, kind: str | None = None) -> None:
        self.key, self.kind = key, kind or self.kind

    def __reduce__(self) -> tuple[Any, ...]:
        return ServerHandle, (self.key, self.kind)  # a worker needs nothing else

    def __repr__(self) -> str:
        return f"<server {self.key}>"

    @property
    def endpoint(self) -> Endpoint:
        """The replica that this worker uses."""
        return directory.current(self.key)

    @property
    def url(self) -> str:
        """Base URL for HTTP, without a path: ``http://127.0.0.1:8000``."""
        return self.endpoint.url

    @property
    def grpc_url(self) -> str:
        """Address for gRPC: ``grpc://127.0.0.1:8001``; empty if the server has none."""
        return self.endpoint.grpc_url

    @property
    def model(self) -> str:
        """Name of the model in requests; empty if the server has none."""
        return self.endpoint.model

    @property
    def api_key(self) -> str:
        """The key that the server expects as a bearer token; empty if it expects none."""
        return self.endpoint.api_key

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers with the key; empty if the server expects none."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def request(self) -> AbstractContextManager[Endpoint]:
        """Choose the replica of one request: ``with llm.request() as endpoint``.

        Of the replicas on the worker's node, else of all, it is the one with the fewest requests of
        this worker in flight.
        """
        return directory.request(self.key)


class HostUrls(Mapping[str, str]):
    """The URL of a server for each host name, as servers of Spark jobs are passed to functions.

    A worker finds its own host in it wherever replicas run. See `ServerHandle` for the choice.
    Outside of workers it is empty.
    """

    def __init__(self, handle: ServerHandle, kind: Literal["http", "grpc"]) -> None:
        self.handle, self.kind = handle, kind

    def __getitem__(self, host: str) -> str:
        if host == socket.gethostname():
            return self._url(self.handle.endpoint)
        for endpoint in directory.endpoints(self.handle.key):
            if endpoint.node == host:
                return self._url(endpoint)
        raise KeyError(host)

    def __iter__(self) -> Iterator[str]:
        if not directory.knows(self.handle.key):
            return iter(())
        nodes = [endpoint.node for endpoint in directory.endpoints(self.handle.key)]
        return iter(dict.fromkeys((socket.gethostname(), *nodes)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _url(self, endpoint: Endpoint) -> str:
        return endpoint.url if self.kind == "http" else endpoint.grpc_url
