"""Plans in other processes, and of many partitions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
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
from support.paths import TESTS
from support.plans import double, settle, source
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


# Keys


def test_keys_are_the_same_in_every_process(tmp_path):
    source(tmp_path, {"a.parquet": 10, "b.parquet": 3})
    udf = "NAMES = {'b', 'a', 'c'}\n\ndef fn(batch):\n    return NAMES\n"
    (tmp_path / "udfs.py").write_text(udf)
    code = textwrap.dedent("""
        import json, sys
        sys.path[:0] = [sys.argv[2], sys.argv[1]]
        from pathlib import Path
        from support.plans import docs, keys, plan
        from vane_dagster.storage.filesystem import Location
        from vane_dagster.storage.store import Store
        from udfs import fn
        root = Path(sys.argv[1])
        made = docs(root, fn=fn, fragment_rows=4, fn_kwargs={})
        print(json.dumps(keys(plan(made, Store(Location(str(root / "store")))))))
    """)
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, str(tmp_path), str(TESTS)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert {len(stage) for stage in found[0].values()} == {4}


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
