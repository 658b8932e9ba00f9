"""The compute resources of a pipeline.

`FragmentStore` is the resource for results.

Dagster inspects the annotations of resources at runtime, so this module does not postpone their
evaluation.
"""

import atexit
import gc
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from vane_dagster.errors import ClusterLostError, ComputeError
from vane_dagster.orchestration.resource_arguments import DeclaredArguments

if TYPE_CHECKING:
    from vane_dagster.compute.api import Backend, Capacity
    from vane_dagster.compute.ray_backend import RayBackend

_connecting = threading.Lock()


def _collect_once() -> None:
    gc.collect()
    gc.freeze()


# Dagster's resources are generic in the value they provide, here the resource itself.
class LocalCluster(DeclaredArguments, dg.ConfigurableResource):  # type: ignore[type-arg]  # it has no value type
    """A Ray head on this machine's loopback address, started on first use.

    It keeps running after the run, so later runs of the same Python environment reuse its warm
    models. It stops after `idle_minutes` without a connected driver. ``vane-dagster cluster list``
    shows the heads of all environments and ``vane-dagster cluster stop`` stops one.
    """

    num_cpus: int | None = Field(default=None, description="CPUs. Default: the machine's.")
    num_gpus: int | None = Field(default=None, description="GPUs. Default: the machine's.")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Custom resources of the node."
    )
    object_store_memory: int | None = Field(
        default=None, description="Bytes for tables between stages. Default: Ray's."
    )
    name: str = Field(default="default", description="Tells several clusters apart.")
    idle_minutes: float | None = Field(
        default=60.0,
        ge=0,
        allow_inf_nan=False,
        description=(
            "Minutes without a connected driver after which the head stops, with the models that "
            "are still loaded: warm models and actors of yours do not keep it up. None or 0: "
            "never. The value of the last run that used the head is in force."
        ),
    )

    def connect(self, start: bool = True) -> None:
        """Connect this process.

        Args:
            start: Whether to start the head if none runs. If False and none runs, do nothing.

        Raises:
            ComputeError: If the head does not start or is not reachable.
        """
        self._head().connect(start)

    def _head(self) -> Any:
        from vane_dagster.compute.local_head import LocalHead

        given = {name: getattr(self, name) for name in LocalCluster.model_fields}
        return LocalHead(**{**given, "idle_minutes": self.idle_minutes or None})


# As for LocalCluster.
class Compute(DeclaredArguments, dg.ConfigurableResource):  # type: ignore[type-arg]  # it has no value type
    """Base class of the compute resources, `RayCompute` and `LocalCompute`."""

    prices: dict[str, float] = Field(
        default_factory=dict,
        description="What a reserved GPU costs, such as {'gpu_hour': 2.5}, for plans and max_cost.",
    )

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Exclude existing objects, such as modules, from garbage collection during the step.

        Its imports trigger full collections, which would take 0.15 s each. At the end of the
        process they would take longer than that, so there is one, of what is unreachable.
        """
        gc.freeze()
        atexit.unregister(_collect_once)
        atexit.register(_collect_once)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Include them again, for processes that outlive the step."""
        gc.unfreeze()

    @property
    def gpu_hour_price(self) -> float | None:
        """The price of a GPU hour, if it is declared.

        Raises:
            ComputeError: If `prices` has something else.
        """
        if not set(self.prices) <= {"gpu_hour"} or any(each < 0 for each in self.prices.values()):
            raise ComputeError(
                f"{type(self).__name__}: prices is {self.prices}; expected the price of a GPU for "
                "an hour, such as {'gpu_hour': 2.5}"
            )
        return self.prices.get("gpu_hour")

    def backend(self) -> "Backend":
        """Connect to the backend that runs the pools."""
        raise NotImplementedError

    def running_capacity(self) -> "Capacity | None":
        """Return its resources, unless that starts a cluster or asks one elsewhere."""
        return None

    def with_subprocesses(self, backend: "Backend") -> "Backend":
        """Return a backend that also hosts pools of subprocesses on this machine.

        Args:
            backend: The backend of a run. Closing the result closes it.
        """
        return backend

    def close(self, backend: "Backend") -> None:
        """Release everything that must not outlive the run."""
        backend.close()


class RayCompute(Compute):
    """Compute on a Ray cluster, with warm actors that outlive the run.

    The cluster is a `LocalCluster` (the default), any `dagster_ray.RayResource`, or an address.
    Stages with a subprocess as `execution_backend` may reserve the resources of `subprocesses`, a
    `LocalCompute`, on this machine. Default: the machine's CPUs and memory, and the GPUs that it
    does not give to the cluster.
    """

    cluster: dg.ResourceDependency[Any] = None  # type: ignore[assignment]  # optional
    subprocesses: dg.ResourceDependency[Any] = None  # type: ignore[assignment]  # optional
    address: str | None = Field(
        default=None,
        description=(
            "Address of a running cluster: 'host:port', 'ray://host:10001', or 'auto' for the one "
            "in the variable RAY_ADDRESS."
        ),
    )
    idle_timeout: float = Field(
        default=600.0,
        gt=0,
        description=(
            "Seconds that a pool stays warm without a lease; with a LocalCluster at most until its "
            "idle_minutes are over."
        ),
    )
    ray_init_options: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of ray.init for an address."
    )

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Connect before the step begins, so that the step's duration does not include it.

        A local head that is not running starts only when there is something to compute.
        """
        super().setup_for_execution(context)
        self._connect(start=False)

    def backend(self) -> "RayBackend":
        """Implement `Compute.backend`.

        Raises:
            ComputeError: If the cluster is not reachable, or both `cluster` and `address` are set.
        """
        self._connect(start=True)
        from vane_dagster.compute.ray_backend import RayBackend

        try:
            return RayBackend(self.idle_timeout)
        except ClusterLostError:  # it was replaced after an earlier run
            self._connect(start=True)
            return RayBackend(self.idle_timeout)

    def running_capacity(self) -> "Capacity | None":
        """Implement `Compute.running_capacity`."""
        if self.address is None and isinstance(self.cluster, (LocalCluster, type(None))):
            is_running = (self.cluster or LocalCluster())._head().find() is not None
        else:
            ray = sys.modules.get("ray")
            is_running = ray is not None and ray.is_initialized()
        if not is_running:
            return None
        from vane_dagster.compute.local_backend import local_capacity

        backend = self.backend()
        try:
            settings = self._settings_here(backend)
            return replace(backend.capacity(), driver=local_capacity(*settings))
        finally:
            self.close(backend)

    def with_subprocesses(self, backend: "Backend") -> "Backend":
        """Implement `Compute.with_subprocesses`.

        Raises:
            ComputeError: If `subprocesses` is not a `LocalCompute`.
        """
        from vane_dagster.compute.local_backend import LocalBackend
        from vane_dagster.compute.ray_backend import RayBackend
        from vane_dagster.compute.routed_backend import RoutedBackend

        assert isinstance(backend, RayBackend)
        return RoutedBackend(backend, LocalBackend.warm(*self._settings_here(backend)))

    def _settings_here(self, backend: Any) -> tuple[Any, ...]:
        """Return what subprocesses beside a cluster may reserve on this machine."""
        own = LocalCompute() if self.subprocesses is None else self.subprocesses
        if not isinstance(own, LocalCompute):
            raise ComputeError(
                f"RayCompute: subprocesses is a {type(own).__name__}; expected a LocalCompute"
            )
        return (own.num_cpus, own.num_gpus, dict(own.resources), backend.gpus_here())

    def _connect(self, start: bool) -> None:
        from vane_dagster.compute.connection import connect_address

        if self.cluster is not None and self.address is not None:
            raise ComputeError("RayCompute: give either cluster or address, not both")
        with _connecting:
            if self.address is not None:
                connect_address(self.address, self.ray_init_options)
            elif self.cluster is None or isinstance(self.cluster, LocalCluster):
                (self.cluster or LocalCluster()).connect(start)
            else:
                _connect_resource(self.cluster)


def command_option(compute: Compute) -> str:
    """Return the option by which a command finds the cluster of a run; empty without need."""
    if not isinstance(compute, RayCompute):
        return ""
    if compute.address is not None:
        return f" --address {compute.address}"
    name = compute.cluster.name if isinstance(compute.cluster, LocalCluster) else "default"
    return "" if name == "default" else f" --name {name}"


def _connect_resource(cluster: Any) -> None:
    """Connect to the cluster of a `dagster_ray.RayResource`, unless it already did so itself."""
    from dagster_ray import RayResource

    from vane_dagster.compute.connection import connect_address

    if not isinstance(cluster, RayResource):
        raise ComputeError(
            f"RayCompute: cluster is a {type(cluster).__name__}; expected a LocalCluster or a "
            "dagster_ray.RayResource, or give address="
        )
    options = dict(cluster.ray_init_options)
    if variables := cluster.get_env_vars_to_inject():
        environment = dict(options.get("runtime_env") or {})
        given = {**variables, **(environment.get("env_vars") or {})}
        options["runtime_env"] = {**environment, "env_vars": given}
    connect_address(cluster.ray_address, options)


class LocalCompute(Compute):
    """Compute in subprocesses of the run, without Ray, to debug a function or a model.

    Models stay warm for the next run of the same process, in the same folder, with the same
    environment variables and the same output. They end with the process, or with its next run after
    ten minutes without use.
    """

    num_cpus: int | None = Field(default=None, description="CPUs. Default: the machine's.")
    num_gpus: int | None = Field(default=None, description="GPUs. Default: the machine's.")
    resources: dict[str, float] = Field(default_factory=dict, description="Custom resources.")

    def backend(self) -> "Backend":
        """Implement `Compute.backend`."""
        from vane_dagster.compute.local_backend import LocalBackend

        return LocalBackend.warm(self.num_cpus, self.num_gpus, dict(self.resources))

    def running_capacity(self) -> "Capacity | None":
        """Implement `Compute.running_capacity`."""
        from vane_dagster.compute.local_backend import local_capacity

        return local_capacity(self.num_cpus, self.num_gpus, dict(self.resources))
