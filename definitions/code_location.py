"""The demo's code location.

It is not in the package's own file, because the commands that import the package need no Dagster.
"""

from __future__ import annotations

import dagster as dg

import vane_dagster as vd
from definitions import docs, questions
from definitions.settings import store_folder

__all__ = ["defs"]

defs = dg.Definitions(
    assets=[*docs.assets, *questions.assets],
    jobs=[docs.job, questions.job],
    schedules=[questions.schedule],
    resources={
        "compute": vd.RayCompute(cluster=vd.LocalCluster()),
        "store": vd.FragmentStore(root=str(store_folder())),
    },
    executor=dg.in_process_executor,  # the work is on the cluster: a process per step gains nothing
)
