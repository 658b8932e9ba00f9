"""The keeper as drivers know it: its name, finding or starting it, and asking it."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from vane_dagster.compute.head_watch import HeadWatch
from vane_dagster.errors import ComputeError

NAMESPACE = "vane_dagster"
_ANSWER_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_PREFIX = "keeper-"
_IN_WORKERS = (
    "fingerprint",
    "pipeline",
    "providers",
    "sources",
    "storage",
    "types",
    "worker",
    "compute",
)


@functools.lru_cache(maxsize=1)
def protocol() -> str:
    """Digest of what runs in workers: code of another version never meets this one's workers."""
    state = hashlib.blake2b(digest_size=6)
    root = Path(__file__).resolve().parent.parent
    single = ("errors.py", "_*.py")
    for pattern in (*single, *(f"{p}/*.py" for p in _IN_WORKERS)):
        for file in sorted(root.glob(pattern)):
            state.update(file.read_bytes())
    return state.hexdigest()


def keeper_name() -> str:
    """Name of the keeper for this version of vane_dagster, Ray and Python, and the job's own.

    The environment that a job gives its workers is part of it, as all workers inherit it.
    """
    import ray

    given = {k: v for k, v in dict(ray.get_runtime_context().runtime_env).items() if v}
    env = json.dumps(given, sort_keys=True, default=str)
    python = f"py{sys.version_info[0]}.{sys.version_info[1]}"
    versions = f"{protocol()}-ray{ray.__version__}-{python}"
    return f"{_PREFIX}{versions}-{hashlib.blake2b(env.encode(), digest_size=4).hexdigest()}"


def is_keeper(name: str) -> bool:
    """Whether an actor's name is that of a keeper."""
    return name.startswith(_PREFIX)


def actor_names() -> list[str]:
    """Names of keepers and workers on the cluster, of all versions."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]


def keepers() -> dict[str, Any]:
    """The keepers on the cluster, of all versions, by name."""
    import ray

    return {
        name: ray.get_actor(name, namespace=NAMESPACE) for name in actor_names() if is_keeper(name)
    }


class KeeperClient:
    """Asks the cluster's keeper, and starts one where there is none.

    Raises:
        ComputeError: If the cluster cannot run it, as where vane_dagster is not installed there.
    """

    def __init__(self) -> None:
        self.watch: HeadWatch | None = None
        self.actor = self._found()

    @classmethod
    def known(cls) -> KeeperClient | None:
        """The client of a keeper that is there already, which it connects to; None without one."""
        if "ray" not in sys.modules:
            return None
        import ray

        found = ray.is_initialized() and keeper_name() in actor_names()
        return cls() if found else None

    def ask(self, method: str, *args: Any) -> Any:
        """Calls a method and waits for the answer, over a restart of the keeper.

        Raises:
            ComputeError: If it does not answer.
        """
        import ray

        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            try:
                return self._answer(getattr(self.actor, method).remote(*args), deadline)
            except ray.exceptions.RayActorError as error:
                if time.monotonic() > deadline:
                    raise _no_answer(method, error) from error
                time.sleep(0.2)
                self.actor = self.watch.call(self._found) if self.watch else self._found()
            except ray.exceptions.RayError as error:
                raise _no_answer(method, error) from error

    def _answer(self, call: Any, deadline: float) -> Any:
        import ray

        while True:
            self._check()
            left = max(1.0, deadline - time.monotonic())
            ended = ray.wait([call], timeout=min(left, _LOOK_SECONDS))[0] or left == 1.0
            self._check()
            if ended:
                return ray.get(call, timeout=left)

    def _check(self) -> None:
        """Ends a call to a lost cluster: after `ray.shutdown` Ray would connect again by itself."""
        if (watch := self.watch) is not None:
            watch.check()

    def tell(self, method: str, *args: Any) -> None:
        """Calls a method and does not wait."""
        getattr(self.actor, method).remote(*args)

    def _found(self) -> Any:
        import ray

        try:
            return _checked(ray.get_actor(keeper_name(), namespace=NAMESPACE))
        except (ValueError, ray.exceptions.RayActorError):  # there is none, or it has just died
            pass
        try:
            return _checked(_started())
        except ray.exceptions.RayActorError as error:
            raise _cannot_run(error) from error


def _started() -> Any:
    """The keeper, started unless another driver was quicker."""
    import ray

    from vane_dagster.compute.pool_manager import Keeper

    options = ray.remote(Keeper).options(
        name=keeper_name(),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=5,
    )
    return options.remote(keeper_name())


def _checked(keeper: Any) -> Any:
    """Sees that a keeper can run, and runs the driver's own code; ends one that can't."""
    import ray

    try:
        there = ray.get(keeper.hello.remote(), timeout=_ANSWER_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        raise _no_answer("hello", error) from error
    except ray.exceptions.RayTaskError as error:
        ray.kill(keeper)
        raise _cannot_run(error) from error
    except ray.exceptions.RayActorError:
        ray.kill(keeper)
        raise
    if there != protocol():
        ray.kill(keeper)
        raise ComputeError(
            f"the cluster has another version of vane-dagster than the driver (protocol {there}, "
            f"expected {protocol()}). Install the driver's version there"
        )
    return keeper


def _cannot_run(error: Exception) -> ComputeError:
    last = str(error).strip().splitlines()[-1]
    return ComputeError(
        f"the keeper of warm pools cannot run on the cluster: {last}. Install vane-dagster there, "
        "in the driver's version"
    )


def _no_answer(method: str, error: Exception) -> ComputeError:
    return ComputeError(
        f"the keeper of warm pools does not answer ({method}): {brief(error)}. See whether the "
        "cluster is alive and has memory left, and start the run again: what is finished is kept"
    )


def brief(error: BaseException) -> str:
    """An error on one line, cut."""
    return " ".join(str(error).split())[:500]
