"""The pool manager as seen by drivers: locating or starting it, and calling it."""

from __future__ import annotations

import time
from typing import Any

from vane_dagster.compute.actor_names import (
    NAMESPACE,
    actor_names,
    is_pool_manager,
    pool_manager_name,
)
from vane_dagster.compute.head_watch import HeadWatch
from vane_dagster.errors import ComputeError
from vane_dagster.worker.code_digest import protocol

_ANSWER_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_WORKER_SECONDS = 30.0
_HEAD = "node:__internal_head__"
"""Ray's resource of the head: clouds that take nodes back do not take the pool manager."""


def pool_managers() -> dict[str, Any]:
    """Pool managers of all versions on the cluster, by name."""
    import ray

    return {
        name: ray.get_actor(name, namespace=NAMESPACE)
        for name in actor_names()
        if is_pool_manager(name)
    }


def ask_pool_managers(method: str, *args: Any) -> dict[str, Any]:
    """Call a method of the pool managers of all versions; return the answers by their names."""
    import ray

    managers = pool_managers()
    try:
        asked = [getattr(manager, method).remote(*args) for manager in managers.values()]
        return dict(zip(managers, ray.get(asked, timeout=_WORKER_SECONDS)))
    except ray.exceptions.RayError as error:
        who = " or ".join(managers)
        raise ComputeError(f"{who} does not answer to {method!r}: {brief(error)}") from error


def running_pools() -> set[str]:
    """Identities of the pools with workers, on the cluster that this process is connected to."""
    listed = ask_pool_managers("pools").values()
    return {pool["identity"] for pools in listed for pool in pools if pool["workers"]}


def ask_worker(worker: str, method: str, *args: Any) -> Any:
    """Call a control method of `HostActor`, and wait for the answer."""
    import ray

    try:
        actor = ray.get_actor(worker, namespace=NAMESPACE)
        return ray.get(getattr(actor, method).remote(*args), timeout=_WORKER_SECONDS)
    except (ray.exceptions.RayActorError, ValueError):
        return None
    except ray.exceptions.RayError as error:
        raise ComputeError(f"worker {worker} does not answer: {brief(error)}") from error


def make_room() -> None:
    """End idle warm workers if they hold all CPUs of the cluster of this process."""
    import ray

    if ray.available_resources().get("CPU", 0) < 1 and pool_manager_name() in actor_names():
        PoolManagerClient().call("evict")


class PoolManagerClient:
    """Client of the cluster's pool manager; starts one if there is none.

    Attributes:
        watch: The watch of the cluster's head.
        adds_nodes: See `Capacity`.
    """

    def __init__(self, watch: HeadWatch | None = None) -> None:
        self.watch = watch or HeadWatch.none()
        self._find()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of `PoolManager` and wait for the answer, across a restart of it."""
        import ray

        deadline = time.monotonic() + _ANSWER_SECONDS
        answer = None
        while True:
            self.watch.check()  # after `ray.shutdown`, Ray would reconnect by itself
            is_late = time.monotonic() > deadline
            try:
                answer = answer or getattr(self.actor, method).remote(*args)
                return ray.get(answer, timeout=_LOOK_SECONDS)
            except ray.exceptions.RayError as error:
                self.watch.check()
                is_dead = isinstance(error, ray.exceptions.RayActorError)
                may_answer = is_dead or isinstance(error, ray.exceptions.GetTimeoutError)
                if is_late or not may_answer:
                    raise _no_answer(method, error) from error
            if is_dead:
                time.sleep(0.2)
                self.watch.call(self._find)
                answer = None

    def send(self, method: str, *args: Any) -> None:
        """Call a method without waiting for the answer."""
        getattr(self.actor, method).remote(*args)

    def _find(self) -> None:
        import ray

        try:
            self._greet(ray.get_actor(pool_manager_name(), namespace=NAMESPACE))
            return
        except (ValueError, ray.exceptions.RayActorError):  # it does not exist, or has just died
            pass
        try:
            self._greet(_started())
        except ray.exceptions.RayActorError as error:
            raise _cannot_run(error) from error

    def _greet(self, actor: Any) -> None:
        """Check that a pool manager can run and has the driver's code; end it otherwise."""
        import ray

        try:
            there, adds_nodes = ray.get(actor.hello.remote(), timeout=_ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError as error:
            raise _no_answer("hello", error) from error
        except ray.exceptions.RayTaskError as error:
            ray.kill(actor)
            raise _cannot_run(error) from error
        except ray.exceptions.RayActorError:
            ray.kill(actor)
            raise
        if there != protocol():
            ray.kill(actor)
            raise ComputeError(
                f"the cluster has another version of vane-dagster than the driver (protocol "
                f"{there}, expected {protocol()}). Install the driver's version on the cluster"
            )
        self.actor = actor
        self.adds_nodes: bool = adds_nodes


def _started() -> Any:
    """The pool manager, started unless another driver was faster."""
    import ray

    from vane_dagster.compute.pool_manager import PoolManager

    options = ray.remote(PoolManager).options(
        name=pool_manager_name(),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources={_HEAD: 0.001},
        max_restarts=-1,
        max_task_retries=5,
    )
    return options.remote(pool_manager_name())


def _cannot_run(error: Exception) -> ComputeError:
    last = str(error).strip().splitlines()[-1]
    return ComputeError(
        f"the pool manager cannot run on the cluster: {last}. Install vane-dagster there, in the "
        "driver's version"
    )


def _no_answer(method: str, error: Exception) -> ComputeError:
    return ComputeError(
        f"the pool manager does not respond ({method}): {brief(error)}. Check that the cluster is "
        "alive and has memory left, and start the run again: finished work is kept"
    )


def brief(error: BaseException) -> str:
    """An error message on one line, truncated."""
    return " ".join(str(error).split())[:500]
