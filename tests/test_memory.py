"""Memory stays bounded whatever the input's size: nothing holds a partition."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from conftest import write_source

SCRIPT = """
import json, os, resource, sys
import dagster as dg
import numpy as np
import vane_dagster as vd

class Widen:
    '''Makes four times the bytes of what comes in.'''
    def __call__(self, batch):
        column = batch["payload"].combine_chunks().flatten().to_numpy().reshape(len(batch), -1)
        return {"wide": np.concatenate([column] * 4, axis=1)}

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

root, width = sys.argv[1], int(sys.argv[2])
cluster = vd.LocalCluster(name="small", num_cpus=2, object_store_memory=256 << 20)
pipeline = vd.Pipeline("big", source=vd.parquet(root + "/src"), id="id", fragment_rows=1_000)
copied = pipeline.project("copied", ["id", "payload"])
wide = copied.map_batches("wide", Widen, schema={"wide": f"FLOAT[{4 * width}]"}, concurrency=2,
                          batch_size=100)
pipeline.join("joined", copied, wide)
cluster.connect()
before = peak()
result = dg.materialize(
    [pipeline.build_assets()],
    resources={"compute": vd.RayCompute(cluster=cluster),
               "store": vd.FragmentStore(root=root + "/store")},
)
after = peak()
import ray
from ray._private.internal_api import memory_summary
print("FACTS " + json.dumps({"success": result.success, "driver_bytes": after - before,
                             "summary": memory_summary(
                                 ray.get_runtime_context().gcs_address, stats_only=True)}))
ray.shutdown()
from vane_dagster.execute.cluster import LocalHead
LocalHead(name="small").stop()
"""


def test_a_stream_of_eight_object_stores_neither_spills_nor_fills_the_driver(tmp_path: Path):
    width, files = 1_000, 8
    payload = np.arange(4_000 * width, dtype="f4").reshape(4_000, width)
    for index in range(files):
        ids = range(index * 4_000, (index + 1) * 4_000)
        write_source(
            tmp_path / "src",
            {"id": ids, "payload": list(payload)},
            f"{index}.parquet",
            row_group_size=1_000,
            use_dictionary=False,
        )
    script = tmp_path / "big.py"
    script.write_text(SCRIPT)

    command = [sys.executable, str(script), str(tmp_path), str(width)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)

    lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    facts = json.loads(lines[0].removeprefix("FACTS "))
    through = files * 4_000 * width * 4 * (1 + 4 + 5)  # copied, wide, joined
    assert through > 4 * (256 << 20)
    assert facts["success"]
    assert "Spilled" not in facts["summary"], facts["summary"]
    assert facts["driver_bytes"] < 100 << 20
