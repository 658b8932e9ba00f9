"""Plans of many partitions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import dagster as dg
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

import vane_dagster as vd
from support.plans import double, settle
from vane_dagster.planning.planner import plan_run
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Location(str(tmp_path / "store")))


class Counted(LocalFileSystem):
    """Local files under another protocol, which counts what is done to them."""

    protocol = ("counted",)
    calls: ClassVar[Counter[str]] = Counter()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("counted://"))

    def unstrip_protocol(self, name: str) -> str:
        return "counted://" + self._strip_protocol(name)

    def ls(self, path: str, **given: Any) -> Any:
        self.calls["list"] += 1
        return super().ls(path, **given)

    def _open(self, path: str, *args: Any, **given: Any) -> Any:
        self.calls[f"open {Path(path).suffix}"] += 1
        return super()._open(path, *args, **given)


def test_finished_partitions_plan_by_listings_alone(tmp_path):
    """No footer and no manifest is opened, and each stage's manifests are listed together."""
    fsspec.register_implementation("counted", Counted, clobber=True)
    partitions = [f"p{n:03}" for n in range(100)]
    data = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": [1], "n": [1]}), data)
    for key in partitions:
        (tmp_path / "src" / key).mkdir(parents=True)
        (tmp_path / "src" / key / "a.parquet").write_bytes(data.getvalue())
    many = vd.Pipeline(
        "many",
        source=vd.parquet(f"counted://{tmp_path}/src/{{partition_key}}"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(partitions),
    )
    many.project("clean", ["n"]).map_batches("doubled", double, schema={"x": "BIGINT"})
    store = Store(Location(f"counted://{tmp_path}/store"))
    settle(plan_run(many, ["clean", "doubled"], partitions, store), store)

    Counted.calls.clear()
    planned = plan_run(many, ["clean", "doubled"], partitions, store)

    assert all(s.done for p in planned.partitions for s in p.stages.values())
    assert len(planned.partitions) == 100
    opened = {name: count for name, count in Counted.calls.items() if name.startswith("open")}
    assert opened == {"open .json": 1}, "the rule of fragments alone"
    sources, manifests = 100, 2 * 101  # a local walk lists each folder on its own
    assert Counted.calls["list"] <= sources + manifests + 2
