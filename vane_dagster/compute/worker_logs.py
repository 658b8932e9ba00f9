"""The logs that Ray keeps of workers, by run and stage.

Those of a local head are read from its folder, also once it has stopped; those of a cluster by a
task on each of its nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vane_dagster.compute.connection import alive_nodes
from vane_dagster.compute.local_head import HeadFolder
from vane_dagster.worker.log_sections import Section, own_logs, sections

__all__ = ["Section", "of_cluster", "of_head"]


def of_head(place: HeadFolder, run_id: str, stage: str) -> Iterator[Section]:
    """Yield what the workers of a local head wrote; see `log_sections.sections`."""
    return sections(sorted(place.temp_dir.glob("r/session_2*/logs")), run_id, stage)


def of_cluster(run_id: str, stage: str) -> Iterator[Section]:
    """Yield what the workers of the cluster wrote that this process is connected to."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    read: Any = ray.remote(num_cpus=0, max_retries=0)(_of_node)
    for node in alive_nodes():
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        given = {"num_returns": "streaming", "scheduling_strategy": place}
        for section in read.options(**given).remote(run_id, stage):
            yield ray.get(section)


def _of_node(run_id: str, stage: str) -> Iterator[Section]:
    yield from sections([own_logs()[0].parent], run_id, stage)
