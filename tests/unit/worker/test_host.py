"""A worker that is stopped."""

from __future__ import annotations

import sys

import cloudpickle
import pyarrow as pa

from vane_dagster.pipeline.contracts import BatchCall
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.part_file import PartTarget
from vane_dagster.worker.host import Host
from vane_dagster.worker.output import OutputTap
from vane_dagster.worker.protocol import CallUdf, ModelSpec, TableRows, Work


def test_worker_that_is_told_to_stop_writes_no_part_of_half_its_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which a host taps
    monkeypatch.setattr(OutputTap, "_instance", None)
    host = Host()

    def told_to_stop(batch):
        host.revoke("lease")
        return batch

    host.models.hold(ModelSpec("told_to_stop", False, "", b""), told_to_stop)
    work = Work(
        "stage 'docs/m', fragment 0",
        CallUdf(cloudpickle.dumps(((), {})), None, BatchCall(), 5, "one_to_one", 16, ("id",), ()),
        (TableRows(0),),
        pa.schema({"id": pa.int64()}),
        "id",
        PartTarget(Location(str(tmp_path)), "key", "id"),
        keep=False,
        lease="lease",
    )

    _, report = host.run(work, pa.table({"id": range(10)}))

    assert report.cancelled
    assert not any(tmp_path.iterdir())
