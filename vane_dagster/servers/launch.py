"""How one replica of a server is started, and the state of one that runs."""

from __future__ import annotations

import contextlib
import socket
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vane_dagster._lazy import http_client
from vane_dagster.errors import described

ServerState = Literal["starting", "ready", "restarting", "failed", "stopped"]


@dataclass(frozen=True)
class Launch:
    """How one replica of a server is started and supervised.

    Attributes:
        label: Name for people.
        command: The command line. ``{host}``, ``{port}``, ``{grpc_port}``, ``{metrics_port}``,
            ``{folder}`` (a private folder), ``{payload}`` (the path of a file with `payload` in
            it), ``{python}`` (the worker's interpreter), ``{triton_runner}`` and ``{cloudpickle}``
            (paths) are replaced.
        health: Path that answers with status 200 to 299 once the server is ready.
        ports: Names of the ports to reserve; the first one is HTTP and has `health`.
        env: Additional environment variables; the same placeholders are replaced in their values.
        key_env: Environment variable in which the server expects its API key, which is generated
            for each replica; None if it knows none.
        model: Name of the model in requests; empty if the server has none.
        payload: Content of a file for the server, such as a pickled function.
        startup_timeout_s: Seconds until the server must be ready.
        liveness_timeout_s: Seconds without a successful health check after which a server that was
            ready is restarted.
        drain_timeout_s: Seconds between SIGTERM, which the command's own process alone gets, and
            SIGKILL.
    """

    label: str
    command: tuple[str, ...]
    health: str = "/health"
    ports: tuple[str, ...] = ("port",)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    key_env: str | None = None
    model: str = ""
    payload: bytes = field(default=b"", repr=False)
    startup_timeout_s: float = 1800.0
    liveness_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0


@dataclass(frozen=True)
class Endpoint:
    """The address of a ready replica.

    Attributes:
        url: Base URL for HTTP, without a path: ``http://127.0.0.1:8000``.
        grpc_url: Address for gRPC, ``grpc://127.0.0.1:8001``; empty if the server has none.
        model: Name of the model in requests; empty if the server has none.
        api_key: The key that the server expects as a bearer token; empty if it expects none.
        health: Path that answers with status 200 to 299.
        node: Host name of its machine.
        node_id: Id of its machine, as `own_node_id` returns it there.
        life: Restarts of the server, and whether it restarts now. Not part of the address.
    """

    url: str
    grpc_url: str = ""
    model: str = ""
    api_key: str = field(default="", repr=False)
    health: str = "/health"
    node: str = ""
    node_id: str = ""
    life: tuple[int, bool] = field(default=(0, False), compare=False)


@dataclass(frozen=True)
class ServerStatus:
    """The state of one replica.

    Attributes:
        state: "ready" if it answers; "restarting" after a crash; "failed" after too many.
        endpoint: Its address, which it keeps while it is restarted; None if it is not up.
        pid: Process id of the server; None if none runs.
        restarts: Restarts since it was first ready.
        reason: Why it was restarted or has failed, with the last lines of its log.
        log_path: Path of its log on its node.
    """

    state: ServerState
    endpoint: Endpoint | None = None
    pid: int | None = None
    restarts: int = 0
    reason: str = ""
    log_path: str = ""


def connected_ray() -> Any:
    """Return the module ray if this process is connected to a cluster; else None."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def own_node_id() -> str:
    """Return the id of this process's machine: of the Ray node if it is on one, else its name."""
    ray = connected_ray()
    return str(ray.get_runtime_context().get_node_id()) if ray else socket.gethostname()


def health_problem(endpoint: Endpoint, timeout: float) -> str:
    """Check the health of a replica; return what is wrong, or nothing."""
    place = urllib.parse.urlsplit(endpoint.url)
    headers = {"Connection": "close"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    try:
        connection = http_client.HTTPConnection(place.hostname or "", place.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request("GET", endpoint.health, headers=headers)
            status = connection.getresponse().status
    except (OSError, http_client.HTTPException) as error:
        return described(error)
    return "" if 200 <= status <= 299 else f"status {status}"


def flags(command: Sequence[str]) -> list[dict[str, str]]:
    """Return the values of a command line's flags by their names."""
    listed = []
    for part, following in zip(command, [*command[1:], ""]):
        if part.startswith("-"):
            name, has_value, value = part.lstrip("-").partition("=")
            listed.append({name: value if has_value else following})
    return listed
