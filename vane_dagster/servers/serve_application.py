"""An application of Ray Serve as a server: deployed by a worker, and run by Serve's own actors."""

from __future__ import annotations

import contextlib
import importlib
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vane_dagster._secrets import masked
from vane_dagster.errors import ModelLoadError, described
from vane_dagster.servers.directory import answers
from vane_dagster.servers.launch import Endpoint, ServerState, ServerStatus
from vane_dagster.servers.running import RunningServer

_POLL_SECONDS = 2.0
_STATES: Mapping[str, ServerState] = {
    "RUNNING": "ready",
    "DEPLOYING": "restarting",
    "UNHEALTHY": "restarting",
    "DEPLOY_FAILED": "failed",
    "DELETING": "stopped",
    "NOT_STARTED": "stopped",
}


@dataclass(frozen=True)
class ServeLaunch:
    """How an application is deployed.

    Attributes:
        label: Name for people.
        name: Name of the application on Serve, and its route.
        import_path: ``module:attribute`` of the application, or of a function that builds it.
        modules: The user's own modules, which travel to the deployments by value.
        args: Arguments of the function that builds it.
        health: Path at Serve's proxy that answers with status 200 to 299.
        model: Name of the model in requests.
    """

    label: str
    name: str
    import_path: str
    modules: tuple[str, ...]
    args: Mapping[str, Any] | None = field(default=None, repr=False)
    health: str = "/-/healthz"
    model: str = ""


class ServedApplication(RunningServer):
    """A deployed application. Serve replaces its replicas; a thread follows their state.

    If an application of the name runs already, because the worker that deployed it was killed, it
    is used as it is.

    Args:
        launch: How it is deployed.

    Raises:
        ModelLoadError: It could not be deployed.
    """

    def __init__(self, launch: ServeLaunch) -> None:
        self._launch = launch
        self._serve = _serve(launch.label)
        began = time.monotonic()
        try:
            while (found := self._found()) == "DELETING":  # a former one, which has its route
                time.sleep(_POLL_SECONDS)
            if found != "RUNNING":  # Serve would replace the replicas of one that runs
                self._deploy()
            self._endpoint = self._address()
        except Exception as error:
            with contextlib.suppress(Exception):  # what failed to start is not left
                self._serve.delete(launch.name)
            raise ModelLoadError(
                f"{launch.label} could not be deployed on Ray Serve: {described(error)}"
            ) from error
        self._ready_at = time.monotonic()
        self._startup_seconds = self._ready_at - began
        self._restarts = 0
        self._state: ServerState = "ready"
        self._reason = ""
        self._over = threading.Event()
        threading.Thread(target=self._follow, name=f"follows {launch.label}", daemon=True).start()

    def _found(self) -> str:
        """Return Serve's status of the application; empty if there is none."""
        found = self._serve.status().applications.get(self._launch.name)
        return "" if found is None else str(getattr(found.status, "value", found.status))

    def _deploy(self) -> None:
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]  # no stubs
        import ray

        launch = self._launch
        address = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
        if not self._is_started():  # the options of a running Serve are those of its owner
            self._serve.start(http_options={"host": address, "port": port})
        module, _, attribute = launch.import_path.partition(":")
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
        for name in launch.modules:
            if name in sys.modules:
                cloudpickle.register_pickle_by_value(sys.modules[name])
        if launch.args is not None or not isinstance(found, self._serve.Application):
            found = found(dict(launch.args or {}))
        self._serve.run(found, name=launch.name, route_prefix=f"/{launch.name}")

    def _is_started(self) -> bool:
        from ray.serve.context import _get_global_client

        return _get_global_client(raise_if_no_controller_running=False) is not None

    def _address(self) -> Endpoint:
        import ray
        from ray.serve.context import _get_global_client

        options = _get_global_client().http_config
        host = ray.util.get_node_ip_address() if options.host == "0.0.0.0" else options.host
        return Endpoint(
            f"http://{host}:{options.port}/{self._launch.name}",
            model=self._launch.model,
            health=self._launch.health,
            node=socket.gethostname(),
        )

    def _follow(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            try:
                found = self._found()
                application = self._serve.status().applications.get(self._launch.name)
                reason = "" if application is None else application.message
            except Exception as error:  # Serve's controller restarts
                found, reason = "UNHEALTHY", described(error)
            state = _STATES.get(found, "stopped")
            self._restarts += self._state != "ready" and state == "ready"
            if state == "ready" != self._state:
                self._ready_at = time.monotonic()
            if state != "ready":
                self._reason = masked(reason)
            self._state = state

    def status(self) -> ServerStatus:
        """See `RunningServer.status`."""
        is_ready = self._state == "ready"
        return ServerStatus(
            self._state if self._state != "stopped" else "failed",
            self._endpoint if is_ready else None,
            None,
            self._startup_seconds,
            time.monotonic() - self._ready_at if is_ready else None,
            self._restarts,
            reason=self._reason or ("" if is_ready else "the application was deleted on Serve"),
        )

    def check_health(self) -> None:
        """See `RunningServer.check_health`.

        Raises:
            RuntimeError: The application was deleted, or its deployment has failed.
        """
        if (status := self.status()).state == "failed":
            raise RuntimeError(f"{self._launch.label} has failed: {status.reason}")

    def probe(self, timeout: float) -> str:
        """See `RunningServer.probe`."""
        if self._state != "ready":
            return self._reason or f"it is {self._state}"
        return "" if answers(self._endpoint) else "Serve's proxy does not answer"

    def read_log(self, offset: int, limit: int) -> tuple[bytes, int]:
        """See `RunningServer.read_log`: where Serve keeps the logs of its replicas."""
        text = f"The logs of its replicas are in logs/serve of Ray's session: {self._launch.name}\n"
        data = text.encode()
        start = max(0, len(data) + offset) if offset < 0 else offset
        return data[start : start + limit], min(len(data), start + limit)

    def stop(self) -> None:
        """See `RunningServer.stop`."""
        self._over.set()
        self._serve.delete(self._launch.name)


def _serve(label: str) -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise ModelLoadError(
            f"{label}: Ray Serve cannot be imported ({error}). Install it on the cluster: "
            "pip install 'vane-dagster[serve]'"
        ) from error
    return serve
