"""The cost of accounting for every row.

``python -m benchmarks.integrity`` prints the share of a fragment's time that goes into checks of
its ids, in the worst case: a function that does almost nothing. It also prints the time and the
memory to check a partition of many ids across its fragments when the id ranges of all fragments
overlap.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import machine
from vane_dagster.engine import committer
from vane_dagster.pipeline.contracts import BatchCall
from vane_dagster.planning.source_code import pack_source
from vane_dagster.sources.files import listed_file
from vane_dagster.sources.parquet import parquet
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import FragmentRecord, Manifest, part_footer, read_part_footer
from vane_dagster.storage.part_file import PartTarget, write_part
from vane_dagster.worker import host, output_ids, source_rows
from vane_dagster.worker.pools import ModelSpec
from vane_dagster.worker.protocol import CallUdf, SourceRows, Work

ROWS = 250_000
REPEATS = 7


def add(batch: pa.Table) -> dict[str, Any]:
    """A function that costs almost nothing."""
    return {"y": batch["x"]}


def given_back(batch: pa.Table) -> dict[str, Any]:
    """The same function, returning the ids in another order."""
    turned = batch.take(np.arange(len(batch))[::-1])
    return {"id": turned["id"], "y": turned["x"]}


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=100_000_000, help="in the large partition")
    parser.add_argument("--parts", type=int, default=100, help="of the large partition")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(_unique(Path.cwd(), given.ids, given.parts)))
        return
    found = machine()
    print(f"{found['cores']} cores ({found['cpu']}), {found['memory']}, Python {found['python']}\n")
    with tempfile.TemporaryDirectory(prefix="vi-", dir="/tmp") as folder:
        root = Path(folder)
        for label, ids in _IDS.items():
            for fn in (add, given_back):
                share, seconds = _share(root, ids(ROWS), fn)
                print(f"{label}, {fn.__name__}: {share:.1%} of {1000 * seconds:.0f} ms a fragment")
        command = [sys.executable, "-m", "benchmarks.integrity", "--child"]
        sizes = ["--ids", str(given.ids), "--parts", str(given.parts)]
        _write_parts(root / "parts", given.ids, given.parts)
        done = subprocess.run(
            [*command, *sizes], cwd=root, check=True, capture_output=True, text=True, env=_env()
        )
        large = json.loads(done.stdout)
        print(
            f"\n{given.ids:,} ids in {given.parts} parts whose ranges overlap: "
            f"{large['seconds']:.1f} s, {large['mebibytes']:.0f} MiB at most"
        )


def _env() -> dict[str, str]:
    import os

    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _sorted(rows: int) -> pa.Array:
    return pa.array(np.arange(rows))


def _shuffled(rows: int) -> pa.Array:
    return pa.array(np.random.default_rng(0).permutation(rows))


def _texts(rows: int) -> pa.Array:
    numbers = np.random.default_rng(0).permutation(rows)
    return pa.array([f"{n * 2654435761 % 2**64:020x}" for n in numbers.tolist()])


_IDS: dict[str, Callable[[int], pa.Array]] = {
    "sorted numbers": _sorted,
    "shuffled numbers": _shuffled,
    "random texts of 20 letters": _texts,
}


def _share(root: Path, ids: pa.Array, fn: Callable[..., Any]) -> tuple[float, float]:
    """Return the share of a fragment's time in checks of ids, and that time in seconds."""
    file = root / "source.parquet"
    floats = np.random.default_rng(1).random((len(ids), 16), dtype=np.float32)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(floats.reshape(-1)), 16)
    table = pa.table({"id": ids, "v": vectors, "x": pa.array(floats[:, 0])})
    pq.write_table(table, file)
    schema = pa.schema([("id", ids.type), ("y", pa.float32())])
    source = parquet(str(file))
    fragment = FragmentRecord(str(file), 0, len(ids), "", 0)
    files = (listed_file(str(file), source),)
    rows = SourceRows(pack_source(source), fragment, table.schema, files, "id")
    arguments = cloudpickle.dumps({})
    op = CallUdf(arguments, None, BatchCall("pyarrow"), 8192, "one_to_one", 1, ("id",), ("y",))
    worker = host.Host()
    worker.hold(ModelSpec("f", False, b""), fn)
    shares, totals = [], []
    for repeat in range(REPEATS):
        target = PartTarget(StoragePath(str(root / "out")), f"{repeat:040x}", "id", ("y",))
        work = Work("stage", op, (rows,), schema, "id", target, False)
        spent = [0.0]
        restore = [
            _timed(source_rows, "repeated_or_null", spent),
            _timed(output_ids, "_check_returned", spent),
        ]
        started = time.perf_counter()
        _, report = worker.run(work)
        total = time.perf_counter() - started
        for put_back in restore:
            put_back()
        assert report.fault is None, report.fault
        shares.append(spent[0] / total)
        totals.append(total)
    return sorted(shares)[REPEATS // 2], sorted(totals)[REPEATS // 2]


def _timed(module: Any, name: str, spent: list[float]) -> Callable[[], None]:
    """Add the time of a module's function to `spent`, until the returned function is called."""
    original = getattr(module, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - started

    setattr(module, name, timed)
    return lambda: setattr(module, name, original)


def _write_parts(folder: Path, ids: int, parts: int) -> None:
    """Write parts that each contain ids from the whole range: every `parts`-th, shuffled."""
    infos = []
    random = np.random.default_rng(0)
    for index in range(parts):
        own = np.arange(index, ids, parts)
        random.shuffle(own)
        target = PartTarget(StoragePath(str(folder)), f"{index:040x}", "id")
        info = write_part(pa.table({"id": own}), target, rows_in=len(own))
        infos.append(part_footer(info))
    (folder / "parts.json").write_text(json.dumps(infos))


def _unique(root: Path, ids: int, parts: int) -> dict[str, float]:
    folder = StoragePath(str(root / "parts"))
    infos = [read_part_footer(t.encode(), "part") for t in json.loads(folder.read("parts.json"))]
    assert sum(info.rows for info in infos) == ids
    manifest = Manifest(
        pipeline="p",
        stage="s",
        partition=None,
        generation="0",
        plan="0" * 32,
        definition="",
        schema=pa.schema([("id", pa.int64())]),
        fragments=[FragmentRecord(f"f{i}", 0, 1, "", 1) for i in range(parts)],
        parts=infos,
        files=[],
        upstream={},
        run_id="r",
        committed_at=0.0,
    )
    started = time.perf_counter()
    committer.check_unique(manifest, folder, "id")
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "mebibytes": peak}


if __name__ == "__main__":
    main()
