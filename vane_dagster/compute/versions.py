"""Versions and environment variables of the cluster's nodes, compared with the driver's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields

from vane_dagster.compute.client import PoolManagerClient, brief
from vane_dagster.compute.code_digest import Versions, installed
from vane_dagster.worker.frameworks import THREADS

_ANSWER_SECONDS = 30.0
_PROCESS_VARIABLES = frozenset(
    {
        *("_", "HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PATH", "PWD", "SHELL", "SHLVL", "TERM"),
        *("TMPDIR", "USER", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV"),
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("PYTHONBREAKPOINT", "SPT_NOENV"),
        *THREADS,
    }
)
"""Variables of the process or machine, and those that Ray or a worker sets in each worker."""
_PROCESS_PREFIXES = ("RAY_", "VANE_DAGSTER_")


def disagreements(
    there: Mapping[str, Versions | str], here: Versions | None = None
) -> Iterator[tuple[str, str, str]]:
    """Report nodes with other versions than the driver."""
    if not there:
        return
    here = here or installed()
    for node, has in there.items():
        if isinstance(has, str):
            fix = "Install vane-dagster there, in the driver's version"
            yield f"node {node}", f"a worker cannot start there: {has}", fix
            continue
        compared = [each.name for each in fields(Versions) if each.compare]
        expected, actual = ({name: getattr(v, name) for name in compared} for v in (here, has))
        wrong = [name for name in expected if expected[name] != actual[name]]
        if wrong:
            shown = {"code": "vane-dagster (digest of its code)", "python": "Python"}
            expectations = ", ".join(f"{shown.get(n, n)} {expected[n]}" for n in wrong)
            found = ", ".join(f"{shown.get(n, n)} {actual[n]}" for n in wrong)
            fix = "Install the driver's versions there, or run the driver from that environment"
            yield f"node {node}", f"the driver has {expectations}; workers there have {found}", fix


def differing_variables(
    there: Mapping[str, Versions | str], candidates: Iterable[str]
) -> list[str]:
    """Return the environment variables that differ between this process and a node."""
    here = dict(os.environ)
    nodes = [has.variables for has in there.values() if isinstance(has, Versions)]
    return sorted(
        name
        for name in set(candidates) - _PROCESS_VARIABLES
        if not name.startswith(_PROCESS_PREFIXES)
        and not all(node.equals(name, here.get(name)) for node in nodes)
    )


def of_cluster(pool_manager: PoolManagerClient) -> Mapping[str, Versions | str]:
    """Versions on each node of the cluster, by node name.

    The pool manager caches the answers of nodes, so a run queries only new nodes.
    """
    import ray

    nodes = {n["NodeID"]: n["NodeManagerHostname"] for n in ray.nodes() if n["Alive"]}
    found: Mapping[str, Versions] = pool_manager.call("exchange_versions", {})
    news = _answers([id for id in nodes if id not in found])
    if fit := {id: has for id, has in news.items() if isinstance(has, Versions)}:
        pool_manager.call("exchange_versions", fit)
    return {f"{nodes[id]} ({id[:8]})": has for id, has in {**found, **news}.items() if id in nodes}


def _answers(ids: list[str]) -> dict[str, Versions | str]:
    """Query each node with a task that reserves nothing; leave out a node that does not answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0, max_retries=0)(installed)
    pending = {}
    for id in ids:
        there = NodeAffinitySchedulingStrategy(id, soft=False)
        pending[ask.options(scheduling_strategy=there).remote()] = id
    if not pending:
        return {}
    ready, late = ray.wait(list(pending), num_returns=len(pending), timeout=_ANSWER_SECONDS)
    found: dict[str, Versions | str] = {}
    for ref in ready:
        try:
            found[pending[ref]] = ray.get(ref)
        except (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError) as error:
            found[pending[ref]] = brief(error)
        except ray.exceptions.RayError:  # the node is gone
            continue
    for ref in late:
        ray.cancel(ref, force=True)
    return found
