"""A run on a small Ray head: ``python -m support.memory_run '{"root": ..., "case": "mixed"}'``.

Prints one line of JSON: whether it succeeded, by how many bytes this process grew, and Ray's
figures of its object store before and after.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import vane_dagster as vd
from support.results import materializing


class Widen:
    """Repeats vectors `times` times, in an async function, like one that waits for a server."""

    def __init__(self, times: int) -> None:
        self.times = times

    async def __call__(self, batch: pa.Table) -> dict[str, Any]:
        column = batch["payload"].combine_chunks().flatten().to_numpy().reshape(len(batch), -1)
        return {"wide": np.concatenate([column] * self.times, axis=1)}


def summed(batch: dict[str, Any]) -> dict[str, Any]:
    return {"sum": batch["wide"].sum(axis=1, dtype="f8")}


def hashed(batch: pa.Table) -> pa.Table:
    digests = [hashlib.sha256(value.as_buffer()).hexdigest() for value in batch["payload"]]
    return pa.table({"copy": batch["payload"], "digest": digests})


def hundredfold(docs: vd.Pipeline) -> None:
    """Declare vectors that are a hundred times as long, and their sums."""
    options: dict[str, Any] = {"fn_constructor_args": [100], "concurrency": 2, "batch_size": 50}
    wide = docs.map_batches("wide", Widen, schema={"wide": "FLOAT[50000]"}, **options)
    options = {"batch_format": "numpy", "concurrency": 1, "batch_size": 50}
    wide.map_batches("sums", summed, schema={"sum": "DOUBLE"}, **options)


def mixed(docs: vd.Pipeline) -> None:
    """Declare rows of very different sizes, copied with their hashes and joined."""
    copied = docs.project("copied", ["id", "payload"])
    schema = {"copy": "BLOB", "digest": "VARCHAR"}
    made = copied.map_batches("hashed", hashed, schema=schema, concurrency=2, batch_size=8)
    docs.join("joined", copied, made)


CASES = {"hundredfold": hundredfold, "mixed": mixed}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(root: str, case: str, fragment_rows: int, store_bytes: int) -> None:
    import ray
    from ray._private.internal_api import memory_summary

    cluster = vd.LocalCluster(name="small", num_cpus=2, object_store_memory=store_bytes)
    source = vd.parquet(root + "/src")
    pipeline = vd.Pipeline("big", source=source, id="id", fragment_rows=fragment_rows)
    CASES[case](pipeline)
    cluster.connect()
    address = ray.get_runtime_context().gcs_address
    facts: dict[str, Any] = {"before": memory_summary(address, stats_only=True)}
    before = peak()
    result = materializing(Path(root))(pipeline, vd.RayCompute(cluster=cluster))
    facts |= {"success": result.success, "driver_bytes": peak() - before}
    facts["after"] = memory_summary(address, stats_only=True)
    print("FACTS " + json.dumps(facts))
    ray.shutdown()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
