"""A code location with a pipeline whose stages ask a server.

``python server_definitions.py PARTITION`` materializes a partition, and prints the counts of the
server in the metadata of its stages, as JSON. The folder is the variable SERVER_RUNS.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import dagster as dg

import vane_dagster as vd
from support.arguments import grouped
from support.data import write_source
from support.server_runs import SCHEMA, ask, echo

KEYS = list("abcd")
ROOT = Path(os.environ["SERVER_RUNS"])
for key in KEYS:
    if not (ROOT / "src" / key).exists():
        write_source(ROOT / "src" / key, {"id": range(10)})

# One word: the content of a file that is a word of the command would count in its identity.
llm = echo("llm", f"--starts={ROOT}/starts")
reviews = vd.Pipeline(
    "reviews",
    source=vd.parquet(str(ROOT / "src/{partition_key}")),
    id="id",
    partitions_def=dg.StaticPartitionsDefinition(KEYS),
    backfill_policy=dg.BackfillPolicy.multi_run(),
)
options = {"schema": SCHEMA, "fn_kwargs": {"llm": llm}, "concurrency": 1}
reviews.map_batches("mood", ask, **grouped(options)).project("kept", ["answer"])
reviews.map_batches("topic", ask, **grouped(options))

assets = [reviews.build_assets(), reviews.build_source()]
resources = {
    "compute": vd.RayCompute(cluster=vd.LocalCluster(name=os.environ.get("SERVER_HEAD", "tests"))),
    "store": vd.FragmentStore(root=str(ROOT / "store")),
}
defs = dg.Definitions(assets, resources=resources)


def main() -> None:
    result = dg.materialize(
        assets,
        selection=[stage.key for stage in reviews],
        partition_key=sys.argv[1],
        resources=resources,
    )
    found = [event.materialization for event in result.get_asset_materialization_events()]
    servers = {
        m.asset_key.path[-1]: {k: v.value for k, v in m.metadata.items() if k.startswith("server_")}
        for m in found
    }
    print(json.dumps(servers))


if __name__ == "__main__":
    main()
