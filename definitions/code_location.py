"""The demo's code location.

It is not in the package's own file, because the commands that import the package need no Dagster.
"""

from __future__ import annotations

from pathlib import Path

import dagster as dg

import vane_dagster as vd
from definitions import docs, questions
from definitions.settings import store_folder

__all__ = ["defs"]

defs = dg.Definitions.merge(
    dg.Definitions(
        assets=docs.assets,
        jobs=[docs.job, questions.job],
        schedules=[questions.schedule],
        resources={
            "compute": vd.RayCompute(cluster=vd.LocalCluster()),
            "store": vd.FragmentStore(root=str(store_folder())),
        },
        # The work is on the cluster: a process per step gains nothing.
        executor=dg.in_process_executor,
    ),
    dg.load_from_defs_folder(path_within_project=Path(__file__).parent),
)
