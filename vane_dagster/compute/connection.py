"""Connection of a process to the local Ray head: with its token, over the loopback address only."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vane_dagster._private_folder import check_private_file, is_safe_to_import_from
from vane_dagster.compute.head_watch import outliving_head
from vane_dagster.errors import ComputeError

if TYPE_CHECKING:
    from vane_dagster.compute.local_head import Head

# Ray rewrites 127.0.0.1 to the host's own address unless multi-node clusters are disabled.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

ANSWER_SECONDS = 5.0


def connect_environment(head: Head) -> dict[str, str]:
    """Environment variables that must be set before a driver of this head imports ray."""
    check_private_file(
        head.token_path,
        "Others may know the token of the local Ray head: stop it with `vane-dagster cluster "
        "stop`; the next one gets a new token.",
    )
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": head.token_path, **LOOPBACK_ONLY}


def connect(head: Head, namespace: str | None = None) -> None:
    """Connect this process to the head; do nothing if it is already connected."""
    if _connected(head):
        return
    try:
        check_answers(head.address, ANSWER_SECONDS)
    except OSError as error:
        raise ComputeError(
            f"The local Ray head at {head.address} does not answer ({error}): it hangs, was "
            "stopped or died. If `vane-dagster cluster list` shows it, stop it with `vane-dagster "
            f"cluster stop --address {head.address}`; the next run starts another."
        ) from error
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would take precedence over the file
    os.environ.update(connect_environment(head))
    import ray

    constants: Any = importlib.import_module("ray._private.ray_constants")
    raylet: Any = importlib.import_module("ray._raylet")
    # Ray reads these once, at import or first use, possibly before this call.
    constants.ENABLE_RAY_CLUSTER = False
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    try:
        with _sigterm_kept(), outliving_head():
            ray.init(
                address=head.address,
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.WARNING,
                job_config=job_config(),
            )
    except (ConnectionError, RuntimeError) as error:
        raise ComputeError(
            f"Cannot connect to the local Ray head at {head.address}: {error}. Stop it with "
            "`vane-dagster cluster stop`; the next run starts another."
        ) from error


def named_address(address: str | None) -> str | None:
    """An address that `ray.init` does not look up: "local" for none; raise for a bare "auto".

    `ray.init` would read it from a file that any user can create, or from any user's processes.
    """
    if os.environ.get("RAY_ADDRESS"):
        return address
    if address == "auto":
        raise ComputeError(
            "address='auto' is the cluster in the variable RAY_ADDRESS, which is not set. Set it, "
            "or name the address that `ray start` has shown"
        )
    return address or "local"


def _connected(head: Head) -> bool:
    """Whether this process is connected to the head; raise if connected to another cluster."""
    if "ray" not in sys.modules:
        return False
    import ray

    if not ray.is_initialized():
        return False
    current = ray.get_runtime_context().gcs_address
    if current == head.address:
        return True
    raise ComputeError(
        f"This process is already connected to the Ray cluster at {current}, not to the local "
        f"head at {head.address}. Call ray.shutdown() first, or name that cluster in the compute "
        "resource."
    )


def is_connected_to(folder: Path) -> bool:
    """Whether this process is connected to the head with its sessions in a folder."""
    if "ray" not in sys.modules:
        return False
    import ray

    if not ray.is_initialized() or ray.util.client.ray.is_connected():
        return False
    session: str = ray.get_runtime_context().get_session_name()
    return (folder / session).is_dir()


def check_answers(address: str, seconds: float) -> None:
    """Check that a gRPC server answers, because `ray.init` retries for minutes.

    The kernel accepts connections on behalf of a hanging process, so this waits for a response. Any
    response counts: a server may refuse or not know the health service.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=seconds).close()
    grpc: Any = importlib.import_module("grpc")
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=seconds)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(f"no response within {seconds:g} s") from error


class _ImportPaths(list[str]):
    """Folders that workers import from, excluding those that another user can write to."""

    def extend(self, folders: Iterable[str]) -> None:
        super().extend(folder for folder in folders if is_safe_to_import_from(folder))


def job_config() -> Any:
    """A job config with which workers do not import from a folder such as ``/tmp``.

    `ray.init` adds the driver's current folder and the folder of its script to the workers' import
    path, before the standard library; warm workers keep them for later runs.
    """
    config: Any = importlib.import_module("ray.job_config").JobConfig()
    config._py_driver_sys_path = _ImportPaths()
    return config


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Preserve the SIGTERM handler, with which Dagster terminates runs: `ray.init` replaces it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
