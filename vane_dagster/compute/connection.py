"""Connection of a process to a Ray cluster; to a local head with its token, on loopback only."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vane_dagster._private_folder import check_private_file, is_safe_to_import_from
from vane_dagster.compute.head_watch import outliving_head
from vane_dagster.errors import ComputeError

if TYPE_CHECKING:
    from vane_dagster.compute.local_head import Head

# Ray rewrites 127.0.0.1 to the host's own address unless multi-node clusters are disabled.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

ANSWER_SECONDS = 10.0
_ADVICE = (
    "Check the address, that the cluster runs, and RAY_AUTH_MODE and its token where it asks for it"
)


def connect_environment(head: Head) -> dict[str, str]:
    """Environment variables that must be set before a driver of this head imports ray."""
    check_private_file(
        head.token_path,
        "Other users may know the token of the local Ray head. Stop it with `vane-dagster cluster "
        "stop`; the next one gets a new token.",
    )
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": head.token_path, **LOOPBACK_ONLY}


def connect(head: Head) -> None:
    """Connect this process to a local head; do nothing if it is already connected."""
    if "ray" not in sys.modules or not sys.modules["ray"].is_initialized():
        os.environ.pop("RAY_AUTH_TOKEN", None)  # it would take precedence over the file
        os.environ.update(connect_environment(head))
        constants: Any = importlib.import_module("ray._private.ray_constants")
        raylet: Any = importlib.import_module("ray._raylet")
        # Ray reads these once, at import or first use, possibly before this call.
        constants.ENABLE_RAY_CLUSTER = False
        raylet.AuthenticationTokenLoader.instance().reset_cache()
    stop = f"`vane-dagster cluster stop --address {head.address}`"
    connect_address(head.address, {}, f"If it hangs, stop it with {stop}; the next run starts one")


def connect_address(address: str | None, options: Mapping[str, Any], advice: str = _ADVICE) -> None:
    """Connect this process to a Ray cluster, unless it is already connected to it."""
    import ray

    if ray.is_initialized():
        _check_is_connected_to(address)
        return
    # Drivers that use Ray Client have no folders for workers to import from.
    job = {} if "://" in (address or "") else {"job_config": job_config()}
    address = named_address(address)
    defaults = {"namespace": "vane_dagster", "logging_level": logging.WARNING}
    try:
        _check_answers(address)
        with _sigterm_kept(), outliving_head():
            ray.init(address=address, **{**defaults, "log_to_driver": False, **job, **options})
        if not options.get("log_to_driver"):  # Ray's own hook waits 0.5 s for logs to print
            atexit.register(ray.shutdown)
    except (OSError, RuntimeError, ValueError) as error:
        raise ComputeError(
            f"the Ray cluster at {address!r} cannot be reached: {error}. {advice}"
        ) from None


def alive_nodes() -> dict[str, dict[str, float]]:
    """Return the resources of the cluster's nodes that are alive, by id."""
    import ray

    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def named_address(address: str | None) -> str | None:
    """An address that `ray.init` does not look up: "local" for none; raise for a bare "auto".

    `ray.init` would read it from a file that any user can create, or from any user's processes.
    """
    if os.environ.get("RAY_ADDRESS"):
        return address
    if address == "auto":
        raise ComputeError(
            "address='auto' is the cluster in the variable RAY_ADDRESS, which is not set. Set it, "
            "or pass the address that `ray start` printed"
        )
    return address or "local"


def _check_is_connected_to(address: str | None) -> None:
    """Check that two plain addresses are the same; Ray Client does not expose its address."""
    import ray

    if address is None or "://" in address:
        return
    host, _, port = address.rpartition(":")
    is_client = ray.util.client.ray.is_connected()
    connected = "a ray:// address" if is_client else ray.get_runtime_context().gcs_address
    if not port.isdigit():
        return
    hosts = {host, ip := socket.gethostbyname(host)}
    if ip.startswith("127."):  # `ray.init` has replaced it by the node's own address
        hosts.add(ray.util.get_node_ip_address())
    if connected not in {f"{each}:{port}" for each in hosts}:
        raise ComputeError(
            f"this process is connected to the Ray cluster at {connected}, not to {address!r}. "
            "Call ray.shutdown() first, or name that cluster in the compute resource"
        )


def _check_answers(address: str | None) -> None:
    """Check that a gRPC server answers at a plain address, because `ray.init` retries for minutes.

    The kernel accepts connections on behalf of a hanging process, so this waits for a response. Any
    response counts: a server may refuse or not know the health service.
    """
    plain = (address or "").removeprefix("ray://")
    host, _, port = plain.rpartition(":")
    if not host or not port.isdigit():  # Ray resolves "auto" and the like
        return
    socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    grpc: Any = importlib.import_module("grpc")
    with grpc.insecure_channel(plain, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(f"no response within {ANSWER_SECONDS:g} s") from error


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
