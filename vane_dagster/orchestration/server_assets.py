"""Model servers as assets of Dagster's graph, each with a health check.

Dagster inspects the annotations of the checks at runtime, so this module does not postpone their
evaluation.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import dagster as dg

from vane_dagster._keywords import known_keywords
from vane_dagster._secrets import errors_masked, masked
from vane_dagster.compute.pool_state import PoolInfo
from vane_dagster.errors import DefinitionError, VaneError, names
from vane_dagster.orchestration.asset_specs import check_servers, server_key
from vane_dagster.orchestration.metadata import sample_table
from vane_dagster.orchestration.resources import Compute
from vane_dagster.pipeline.servers import ModelServer, servers_by_key
from vane_dagster.worker.protocol import WorkerInfo

CHECK = "healthy"
"""Name of the health check of a server's asset."""
_LOG_BYTES = 2**14
_LOG_LINES = 20


@known_keywords("vd.server_assets")
def server_assets(
    servers: Sequence[ModelServer],
    *,
    group_name: str = "servers",
    automation_condition: Union[dg.AutomationCondition[Any], None] = None,
) -> list[Union[dg.AssetSpec, dg.AssetChecksDefinition]]:
    """Return servers as assets ``servers/<name>``, for `dg.Definitions(assets=[...])`.

    They are external: runs start servers, nothing materializes them. Each has a check ``healthy``,
    which asks all warm replicas and never starts one. It fails with the last lines of the log if a
    replica has failed or does not answer, and passes if the server is not started. It requires the
    resource ``compute``.

    Give the same servers to `Pipeline.build_assets` to show in the graph which stages call them.

    Args:
        servers: The servers.
        group_name: Their group in Dagster's graph.
        automation_condition: When to evaluate the checks, such as
            ``dg.AutomationCondition.cron_tick_passed("*/10 * * * *")``. Default: on request.

    Raises:
        DefinitionError: If `servers` has something else, or two servers of one name.
    """
    check_servers("vd.server_assets", servers)
    try:
        distinct = servers_by_key(servers).values()
    except DefinitionError as error:
        raise DefinitionError(f"vd.server_assets: {error}") from None
    # Dagster names a check's op by the key, with '_' for '-' and '.'.
    found = [(server_key(server).to_python_identifier(), server.name) for server in distinct]
    ops = [op for op, _ in found]
    if alike := sorted({name for op, name in found if ops.count(op) > 1}):
        raise DefinitionError(
            f"vd.server_assets: several servers are named {names(alike)}; give each a name of its "
            "own by name=, which differs not only in '-', '.' and '_'"
        )
    return [
        made
        for server in distinct
        for made in (_spec(server, group_name), _check(server, automation_condition))
    ]


def _spec(server: ModelServer, group_name: str) -> dg.AssetSpec:
    options = server.options
    return dg.AssetSpec(
        key=server_key(server),
        description=f"{server.label}, started by the runs that use it.",
        group_name=group_name,
        kinds={server.kind.split()[0].lower()},
        metadata={
            "command": masked(shlex.join(map(str, server.command))),
            "replicas": _replicas(server),
            "reserves": server.reserved.bundle() or "nothing",
            **({"model": server.model} if server.model else {}),
            **({} if options.idle_minutes is None else {"idle_minutes": options.idle_minutes}),
            "log": f"vane-dagster servers logs {server.name}",
        },
    )


def _replicas(server: ModelServer) -> str:
    (least, most), per_node = server.options.replicas, server.options.per_node
    if per_node is not None:
        return f"{per_node} per node"
    return str(least) if least == most else f"{least} to {most}"


def _check(
    server: ModelServer, automation_condition: Union[dg.AutomationCondition[Any], None]
) -> dg.AssetChecksDefinition:
    @dg.asset_check(
        asset=server_key(server),
        name=CHECK,
        description="The warm replicas answer. It starts none, and passes if there is none.",
        automation_condition=automation_condition,
    )
    def healthy(compute: dg.ResourceParam[Compute]) -> dg.AssetCheckResult:
        with errors_masked():
            try:
                found = [pool for pool in compute.pools() if pool["identity"] == server.identity()]
                return evaluation(found)
            except VaneError as error:
                raise dg.Failure(description=str(error)) from error.__cause__

    return healthy


@dataclass(frozen=True)
class _Replica:
    """A replica as the check found it.

    Attributes:
        info: What its worker reports.
        problem: What is wrong, with the last lines of its log; empty if it answers or starts.
    """

    info: WorkerInfo
    problem: str

    @property
    def state(self) -> str:
        return self.info["server"]["state"] if "server" in self.info else self.info["state"]

    def __str__(self) -> str:
        where = f"Replica {self.info['name']} on {self.info.get('node', 'an unknown node')}"
        return f"{where} is {self.state}: {self.problem}"


def _asked(info: WorkerInfo) -> _Replica:
    from vane_dagster.compute.client import ask_worker

    status = info.get("server", {})
    if info["state"] == "dead":
        return _Replica(info, "its worker is dead")
    if status.get("state") == "ready":
        answer = ask_worker(info["name"], "probe_server")
        if answer is None:
            return _Replica(info, "its worker is dead")
        return _Replica(info, f"it does not answer: {answer}{_log(info)}" if answer else "")
    has_ended = status.get("state") in ("failed", "stopped", "restarting")
    return _Replica(
        info, (status.get("reason") or f"it has ended{_log(info)}") if has_ended else ""
    )


def _log(info: WorkerInfo) -> str:
    """Return the last lines of a replica's log."""
    from vane_dagster.compute.client import ask_worker

    answer = ask_worker(info["name"], "read_log", -_LOG_BYTES, _LOG_BYTES)
    lines = answer[0].decode(errors="replace").splitlines() if answer else []
    tail = "\n".join(lines[-_LOG_LINES:])
    return f"\nLast lines of its log:\n{tail}" if tail else ""


def evaluation(found: Sequence[PoolInfo]) -> dg.AssetCheckResult:
    """Return the result of a server's check.

    Args:
        found: The server's pool; empty if it is not started.
    """
    replicas = [_asked(worker) for pool in found for worker in pool["workers"]]
    if not replicas:
        return dg.AssetCheckResult(
            passed=True,
            description="Not started. The first run that uses it starts it.",
            metadata={"replicas": 0},
        )
    failed = [replica for replica in replicas if replica.problem]
    ready = [r for r in replicas if r.state == "ready" and not r.problem]
    metadata = _metadata(found, replicas)
    if failed:
        return dg.AssetCheckResult(
            passed=False,
            # Runs go on with the others.
            severity=dg.AssetCheckSeverity.WARN if ready else dg.AssetCheckSeverity.ERROR,
            description=masked("\n\n".join(map(str, failed))),
            metadata=metadata,
        )
    starting = len(replicas) - len(ready)
    answer = f"{len(ready)} {'replica answers' if len(ready) == 1 else 'replicas answer'}"
    return dg.AssetCheckResult(
        passed=True,
        description=f"{answer}, {starting} still starting." if starting else f"{answer}.",
        metadata=metadata,
    )


def _metadata(found: Sequence[PoolInfo], replicas: Sequence[_Replica]) -> Mapping[str, Any]:
    servers = [replica.info.get("server", {}) for replica in replicas]
    rows = [
        {
            "URL": status.get("url", ""),
            "node": replica.info.get("node", ""),
            "state": replica.state,
            "restarts": str(status.get("restarts", "")),
            "uptime (s)": f"{status.get('uptime_seconds') or 0:.0f}",
        }
        for replica, status in zip(replicas, servers)
    ]
    return {
        "replicas": len(replicas),
        "requests_in_flight": sum(status.get("in_flight") or 0 for status in servers),
        "restarts": sum(status.get("restarts", 0) for status in servers),
        "leases": sum(len(pool["leases"]) for pool in found),
        "servers": dg.MetadataValue.md(sample_table(rows)),
    }
