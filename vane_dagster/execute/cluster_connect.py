"""Connecting a process to the local Ray head: with its token, over the loopback address only."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vane_dagster.errors import ComputeError

if TYPE_CHECKING:
    from vane_dagster.execute.cluster import Head

# Ray rewrites 127.0.0.1 to the host's own address unless multi-node clusters are switched off.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def connect_environment(head: Head) -> dict[str, str]:
    """The variables that must be set before a driver of this head imports ray."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": head.token_path, **LOOPBACK_ONLY}


def connect(head: Head, namespace: str | None = None, log_to_driver: bool = False) -> None:
    """Connects this process to the head; nothing to do where it is connected already.

    Raises:
        ComputeError: The head does not answer, or this process uses another cluster.
    """
    if _connected(head):
        return
    _check_answers(head)
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would win over the file
    os.environ.update(connect_environment(head))
    import ray

    constants: Any = importlib.import_module("ray._private.ray_constants")
    raylet: Any = importlib.import_module("ray._raylet")
    # Ray reads these once, at its import or first use, and that may lie before this call.
    constants.ENABLE_RAY_CLUSTER = False
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    try:
        with _sigterm_kept():
            ray.init(
                address=head.address,
                namespace=namespace,
                log_to_driver=log_to_driver,
                logging_level=logging.WARNING,
            )
    except (ConnectionError, RuntimeError) as error:
        raise ComputeError(
            f"Cannot connect to the local Ray head at {head.address}: {error}. Stop it with "
            "`vane-dagster cluster stop`; the next run starts another."
        ) from error


def _connected(head: Head) -> bool:
    """Whether this process is connected to the head; to any other cluster is an error."""
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


def _check_answers(head: Head) -> None:
    """Fails at once where Ray would retry for over a minute."""
    host, _, port = head.address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ComputeError(
            f"The local Ray head at {head.address} does not answer ({error}): it was stopped or "
            "died. Run again: a new one is started."
        ) from error


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keeps the handler of SIGTERM, which `ray.init` replaces and Dagster terminates runs by."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
