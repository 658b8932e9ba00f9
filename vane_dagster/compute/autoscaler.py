"""Ray's autoscaler, as seen from a process on the cluster: whether one exists, and requests to it.

Ray has two versions, which report their state in different places: the first writes a report into
the internal key-value store, the second into the GCS. Neither reports which nodes it could add; a
platform that publishes Ray's cluster configuration does.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vane_dagster.compute.demand import Demand, ScaleVerdict, listed
from vane_dagster.compute.placement import Bundle, NodeType, fits
from vane_dagster.compute.pool_state import PoolState

_LOOK_SECONDS = 0.25
_VERDICT_SECONDS = 45.0
_SILENT_SECONDS = 120.0
_FAILED_SECONDS = 120.0
_REPORTS = 3
_ANSWER_SECONDS = 5
# An "autoscaler" that only mirrors manually started nodes names node types after the nodes.
_MIRRORED = re.compile(r"node_[0-9a-f]{56}")
_KEY = b"asked"
_KV_NAMESPACE = b"vane_dagster"


class ClusterScaler:
    """Requests nodes from the autoscaler for waiting leases, and withdraws the request.

    Requests nothing while the existing nodes suffice.

    Args:
        pool_state: State of the pool manager.
    """

    def __init__(self, pool_state: PoolState) -> None:
        self._pool_state = pool_state
        self._demand = Demand()
        self._wanted: list[Bundle] = []
        self._autoscaler = of_cluster()
        self._lock = asyncio.Lock()

    def kinds(self) -> tuple[NodeType, ...] | None:
        """See `Capacity.growth`."""
        return self._autoscaler.growth()

    def step(self, nodes: Mapping[str, Bundle]) -> None:
        """Update the request to match the waiting leases."""
        if self._lock.locked():
            return
        if not self._pool_state.queue or self.kinds() == ():
            self._demand, self._wanted = Demand(), []
        else:
            seen = ScaleVerdict.UNSEEN
            if self._wanted and self._wanted == self._autoscaler.asked:
                seen = self._autoscaler.verdict(list(nodes.values()))
            self._wanted = self._demand.step(self._pool_state, nodes, time.monotonic(), seen)
        self._autoscaler.ask(self._wanted)

    async def infeasible_reason(
        self, bundles: Sequence[Bundle], nodes: Callable[[], Mapping[str, Bundle]]
    ) -> str | None:
        """Return why the cluster can never hold bundles together; None if it can now or later.

        Requests these bundles alone: resources used by others count as free.

        Args:
            bundles: Resource bundles to place together.
            nodes: Returns the resources of each node, by node id.
        """
        until = time.monotonic() + _VERDICT_SECONDS
        async with self._lock:
            if fits(list(nodes().values()), bundles) or time.monotonic() > until:
                return None  # too many concurrent requests; the lease detects it
            self._autoscaler.ask(bundles)
            while (seen := self._autoscaler.verdict(list(nodes().values()))) is ScaleVerdict.UNSEEN:
                if time.monotonic() > until:
                    return f"its autoscaler has not answered for {_VERDICT_SECONDS:g} s"
                await asyncio.sleep(_LOOK_SECONDS)
        return (
            "its autoscaler has no nodes to add for that"
            if seen is ScaleVerdict.INFEASIBLE
            else None
        )

    def asked_for(self, id: str) -> str:
        """Nodes requested from the autoscaler for a lease request, and their progress, as text."""
        if id not in self._demand.asked_for():
            return ""
        doing = self._autoscaler.under_way()
        return listed(self._autoscaler.asked) + (f" ({doing})" if doing else "")

    def is_hopeless(self, id: str) -> bool:
        """Whether no nodes can be added for a request."""
        return id in self._demand.hopeless


def of_cluster() -> Autoscaler:
    """Return the autoscaler of the version that the cluster runs."""
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    return _Second() if is_autoscaler_v2() else _First()


class Autoscaler(ABC):
    """Common part of both versions.

    Ray keeps one request for the whole cluster: each new request overwrites the previous one.
    """

    def __init__(self) -> None:
        from ray.experimental.internal_kv import internal_kv_get_gcs_client

        self._gcs: Any = internal_kv_get_gcs_client()
        # A former pool manager may have died before it withdrew its request.
        left = self._gcs.internal_kv_get(_KEY, namespace=_KV_NAMESPACE, timeout=_ANSWER_SECONDS)
        self.asked: list[Bundle] = json.loads(left) if left else []

    def growth(self) -> tuple[NodeType, ...] | None:
        """The node types that may be added; None if there are some but they are unknown."""
        import ray

        config = ray._private.state.state.get_cluster_config()
        if config and config.node_group_configs:
            return _kinds(config, self._nodes())
        return None if self._is_there() else ()

    def ask(self, bundles: Sequence[Bundle]) -> None:
        """Request a total cluster size in bundles; withdraw the request if there are none.

        If another program has overwritten the request, it is posted again, but never withdrawn.
        """
        if not bundles and not self.asked:
            return
        there, ours = self._posted(), _counted(self.asked)
        if there != _counted(bundles) and (bundles or there == ours):
            self._post(bundles)
        if list(bundles) != self.asked:
            self.asked = [dict(bundle) for bundle in bundles]
            text = json.dumps(self.asked).encode()
            given: dict[str, Any] = {"namespace": _KV_NAMESPACE, "timeout": _ANSWER_SECONDS}
            self._gcs.internal_kv_put(_KEY, text, True, **given)

    def _nodes(self) -> Sequence[Any]:
        """The nodes as the GCS reports them to autoscalers."""
        from ray.autoscaler.v2.sdk import get_cluster_resource_state
        from ray.core.generated.autoscaler_pb2 import NodeStatus

        states = get_cluster_resource_state(self._gcs).node_states
        return [node for node in states if node.status != NodeStatus.DEAD]

    def _post(self, bundles: Sequence[Bundle]) -> None:
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[dict(bundle) for bundle in bundles])

    @abstractmethod
    def verdict(self, nodes: Sequence[Bundle]) -> ScaleVerdict:
        """Return the autoscaler's verdict on the last request, given the resources of the nodes."""

    @abstractmethod
    def under_way(self) -> str:
        """Progress of the request, as text for people: starting nodes, and failed starts."""

    @abstractmethod
    def _is_there(self) -> bool: ...

    @abstractmethod
    def _posted(self) -> Counter[Any]: ...


class _First(Autoscaler):
    """Version 1, Ray's default outside of Kubernetes."""

    def __init__(self) -> None:
        super().__init__()
        self._short: set[float] = set()

    def _report(self) -> dict[str, Any]:
        from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS

        key = DEBUG_AUTOSCALING_STATUS.encode()
        text = self._gcs.internal_kv_get(key, namespace=None, timeout=_ANSWER_SECONDS)
        return json.loads(text) if text else {}

    def _is_there(self) -> bool:
        report = self._report()
        scaler = report.get("autoscaler_report")
        if not scaler or time.time() - report["time"] > _SILENT_SECONDS:
            return False
        types = [*scaler["active_nodes"], *scaler["pending_launches"]]
        return any(not _MIRRORED.fullmatch(name) for name in types)

    def _posted(self) -> Counter[Any]:
        from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL as key

        text = self._gcs.internal_kv_get(key, namespace=None, timeout=_ANSWER_SECONDS)
        return _counted(json.loads(text) if text else [])

    def ask(self, bundles: Sequence[Bundle]) -> None:
        if list(bundles) != self.asked:
            self._short.clear()
        super().ask(bundles)

    def verdict(self, nodes: Sequence[Bundle]) -> ScaleVerdict:
        """Infer the verdict: this version starts what it can and never reports that it cannot.

        A recent failure to start a node does not count as a refusal, because it is retried.
        """
        report = self._report()
        seen = Counter[Any]()
        for bundle, count in report.get("load_metrics_report", {}).get("request_demand", []):
            seen[_key(bundle)] = count
        if seen != _counted(self.asked):
            return ScaleVerdict.UNSEEN
        scaler = report["autoscaler_report"]
        starting = scaler["pending_resources"] if _starting(scaler) else {}
        has = Counter[str](starting)
        for node in nodes:
            has.update(node)
        needs = Counter[str]()
        for bundle in self.asked:
            needs.update(bundle)
        enough = all(has[name] >= amount for name, amount in needs.items())
        if (enough and (starting or fits(nodes, self.asked))) or _failures(scaler):
            self._short.clear()
            return ScaleVerdict.SERVED
        self._short.add(report["time"])
        return ScaleVerdict.INFEASIBLE if len(self._short) >= _REPORTS else ScaleVerdict.UNSEEN

    def under_way(self) -> str:
        scaler = self._report().get("autoscaler_report") or {}
        return _describe_pending(_starting(scaler), _failures(scaler)) if scaler else ""


class _Second(Autoscaler):
    """Version 2, KubeRay's default."""

    def __init__(self) -> None:
        super().__init__()
        self._asked_at = 0

    def _status(self) -> Any:
        from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

        reply = GetClusterStatusReply()
        reply.ParseFromString(self._gcs.get_cluster_status(timeout_s=_ANSWER_SECONDS))
        return reply

    def _is_there(self) -> bool:
        """Also true for one that mirrors manually started nodes, which cannot add any."""
        return bool(self._status().autoscaling_state.last_seen_cluster_resource_state_version)

    def _posted(self) -> Counter[Any]:
        return _constrained(self._status().cluster_resource_state.cluster_resource_constraints)

    def _post(self, bundles: Sequence[Bundle]) -> None:
        super()._post(bundles)
        self._asked_at = self._status().cluster_resource_state.cluster_resource_state_version

    def verdict(self, nodes: Sequence[Bundle]) -> ScaleVerdict:
        status = self._status()
        state = status.autoscaling_state
        if state.last_seen_cluster_resource_state_version <= self._asked_at:
            return ScaleVerdict.UNSEEN
        infeasible = _constrained(state.infeasible_cluster_resource_constraints)
        return (
            ScaleVerdict.INFEASIBLE if infeasible == _counted(self.asked) else ScaleVerdict.SERVED
        )

    def under_way(self) -> str:
        state = self._status().autoscaling_state
        starting = Counter[str]()
        for launch in state.pending_instance_requests:
            starting[launch.ray_node_type_name] += launch.count
        for instance in state.pending_instances:
            starting[instance.ray_node_type_name] += 1
        failed = [
            (f.ray_node_type_name, f.reason)
            for f in state.failed_instance_requests
            if time.time() - f.failed_ts < _FAILED_SECONDS
        ]
        return _describe_pending(starting, failed)


def _kinds(config: Any, nodes: Sequence[Any]) -> tuple[NodeType, ...]:
    """Node groups of a cluster's configuration that can grow, and by how much."""
    total = Counter[str]()
    for node in nodes:
        total.update(node.total_resources)
    found = []
    for group in config.node_group_configs:
        resources = dict(group.resources)
        count = sum(_is_of(node, group) for node in nodes)
        more = sys.maxsize if group.max_count == -1 else group.max_count - count
        for name, most in config.max_resources.items():
            if resources.get(name):
                more = min(more, int((most - total[name]) // resources[name]))
        if more > 0 and resources:
            found.append(NodeType(resources, more))
    return tuple(found)


def _is_of(node: Any, group: Any) -> bool:
    """Whether a node belongs to a group; a node of unknown type is matched by its CPUs and GPUs."""
    if node.ray_node_type_name:
        return bool(node.ray_node_type_name == group.name)
    has: Mapping[str, float] = node.total_resources
    return all(has.get(n, 0) == group.resources.get(n, 0) for n in ("CPU", "GPU"))


def _starting(scaler: Mapping[str, Any]) -> Counter[str]:
    found = Counter[str](scaler["pending_launches"])
    found.update(kind for _, kind, _ in scaler["pending_nodes"])
    return +found


def _failures(scaler: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Node types with a recent failed start, each with the reason."""
    known = (scaler.get("node_availability_summary") or {}).get("node_availabilities", {})
    return [
        (name, (fault["unavailable_node_information"] or {}).get("description", ""))
        for name, fault in known.items()
        if not fault["is_available"]
        and time.time() - fault["last_checked_timestamp"] < _FAILED_SECONDS
    ]


def _describe_pending(starting: Mapping[str, int], failed: Sequence[tuple[str, str]]) -> str:
    messages = []
    if starting:
        nodes = ", ".join(f"{count} x {name}" for name, count in sorted(starting.items()))
        messages.append(f"nodes that start: {nodes}")
    messages += [f"a node {name} could not be started: {why}" for name, why in failed]
    return "; ".join(messages)


def _key(bundle: Mapping[str, float]) -> frozenset[tuple[str, float]]:
    return frozenset((name, float(amount)) for name, amount in bundle.items())


def _counted(bundles: Sequence[Bundle]) -> Counter[Any]:
    return Counter(_key(bundle) for bundle in bundles)


def _constrained(constraints: Any) -> Counter[Any]:
    """Bundles of resource constraints in the GCS."""
    found = Counter[Any]()
    for constraint in constraints:
        for one in constraint.resource_requests:
            found[_key(one.request.resources_bundle)] += one.count
    return found
