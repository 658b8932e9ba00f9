"""Tests of your own pipeline, with pytest: a failing row, a dying worker, a full disk.

``pytest examples/test_my_pipeline.py`` runs them; as a script, the file then runs the pipeline.
The faults are injected from outside, so the tests run your production code.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd
from vane_dagster import testing

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "reviews").absolute()
TEXTS = ["good", "bad", "very good", "not good", "very bad", "as expected"]


class Sentiment:
    """Stands for a model of yours."""

    def __init__(self, words: dict[str, int]) -> None:
        self.words = words

    def __call__(self, batch: pa.Table) -> pa.Table:
        texts = batch["text"].to_pylist()
        return pa.table({"mood": [sum(self.words.get(w, 0) for w in t.split()) for t in texts]})


def reviews(root: Path) -> vd.Pipeline:
    """The pipeline, over the data below a folder."""
    pipeline = vd.Pipeline("reviews", source=vd.parquet(str(root / "in")), id="id")
    rated = pipeline.map_batches(
        "rated",
        functools.partial(Sentiment, words={"good": 1, "bad": -1}),
        schema={"mood": "BIGINT"},
        batch_size=2,
        on_error=vd.Failures("quarantine", max_error_rate=0.2),
    )
    rated.write("published", str(root / "out"))
    return pipeline


def run(root: Path, compute: Any, **given: Any) -> dg.ExecuteInProcessResult:
    """Makes the input if there is none, and materializes the pipeline."""
    if not (root / "in").exists():
        (root / "in").mkdir(parents=True)
        pq.write_table(
            pa.table({"id": range(len(TEXTS)), "text": TEXTS}), root / "in" / "a.parquet"
        )
    resources = {"compute": compute, "store": vd.FragmentStore(root=str(root / "store"))}
    return dg.materialize([reviews(root).build_assets()], resources=resources, **given)


def published(root: Path) -> dict[int, int]:
    rows = pq.read_table(root / "out")
    return dict(zip(rows["id"].to_pylist(), rows["mood"].to_pylist()))


MOODS = {0: 1, 1: -1, 2: 1, 3: 1, 4: -1, 5: 0}


def test_a_row_that_fails_costs_no_other_row(tmp_path: Path) -> None:
    with testing.faults(testing.CallFault("rated", ids=[3], error="ValueError")):
        run(tmp_path, vd.LocalCompute(num_cpus=1))
    assert published(tmp_path) == {id: mood for id, mood in MOODS.items() if id != 3}
    store = vd.FragmentStore(root=str(tmp_path / "store"))
    quarantined = vd.quarantine("reviews/rated", store=store)
    assert quarantined.select(["id", "error"]).to_pylist() == [{"id": 3, "error": "ValueError"}]


def test_a_worker_that_dies_costs_no_row(tmp_path: Path) -> None:
    with testing.faults(testing.CallFault("rated", "kill", calls=2)) as injected:
        run(tmp_path, vd.LocalCompute(num_cpus=1))
    assert injected.fired == (1,)
    assert published(tmp_path) == MOODS


def test_a_full_disk_fails_the_run_and_the_next_one_goes_on(tmp_path: Path) -> None:
    compute = vd.LocalCompute(num_cpus=1)
    with testing.faults(testing.StorageFault("*/out/*.parquet", "no_space")):
        assert not run(tmp_path, compute, raise_on_error=False).success
    result = run(tmp_path, compute)
    assert published(tmp_path) == MOODS
    rated = result.asset_materializations_for_node("reviews_pipeline")[0]
    assert rated.metadata["rows_computed"].value == 0


def main() -> None:
    import pytest  # not in the workers, which import this file

    code = pytest.main(["-q", __file__])
    result = run(ROOT, vd.RayCompute())
    for done in result.asset_materializations_for_node("reviews_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    sys.exit(code)


if __name__ == "__main__":
    main()
