"""A run that is killed computes at most what was in flight."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import vane_dagster as vd
from support.damage import stored_parts
from support.data import write_source
from support.results import metadata

SCRIPT = """
import sys
import dagster as dg
import vane_dagster as vd
from resume_pipeline import make

root = sys.argv[1]
dg.materialize(
    [make(root).build_assets()],
    resources={"compute": vd.LocalCompute(), "store": vd.FragmentStore(root=root + "/store")},
)
"""

PIPELINE = """
import time
import vane_dagster as vd

class Slow:
    def __call__(self, batch):
        time.sleep(0.3)
        return batch

def make(root):
    pipeline = vd.Pipeline("slow", source=vd.parquet(root + "/src"), id="id", fragment_rows=10)
    pipeline.map_batches("slept", Slow, schema={"id": "BIGINT"}, batch_size=10)
    return pipeline
"""


def test_a_killed_run_computes_at_most_what_was_in_flight(tmp_path, monkeypatch, materialize):
    write_source(tmp_path / "src", {"id": range(200)})
    (tmp_path / "resume_pipeline.py").write_text(PIPELINE)
    (tmp_path / "run.py").write_text(SCRIPT)
    parts = tmp_path / "store" / "slow" / "slept" / "parts" / "~unpartitioned"

    run = subprocess.Popen([sys.executable, str(tmp_path / "run.py"), str(tmp_path)])
    deadline = time.monotonic() + 60
    while len(stored_parts(parts)) < 5:
        assert time.monotonic() < deadline, "no parts were written"
        assert run.poll() is None, "the run ended before it could be killed"
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()

    kept = len(stored_parts(parts))
    assert kept < 20
    assert not (tmp_path / "store" / "slow" / "slept" / "manifests").exists()

    monkeypatch.syspath_prepend(tmp_path)
    from resume_pipeline import make

    facts = metadata(materialize(make(str(tmp_path)), vd.LocalCompute()), "slept")
    assert facts["fragments_reused"] == kept
    assert facts["fragments_computed"] == 20 - kept
    store = vd.FragmentStore(root=str(tmp_path / "store"))
    assert store.dataset("slow/slept").to_table()["id"].to_pylist() == list(range(200))
