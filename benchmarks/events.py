"""The cost of Dagster's events of a ranged run, in seconds, bytes and SQL statements per partition.

``python -m benchmarks.events`` computes 60 partitions of 3 stages with a model that costs nothing.
``bare`` is the work alone, without Dagster; ``run`` is the same work as a Dagster step; ``again``
is a step in another Dagster instance, which reports partitions that the store already contains.

``--postgres URL`` measures PostgreSQL instead of SQLite; the database is emptied.
``--against FOLDER`` measures another checkout of this project alternately with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import sqlalchemy
from sqlalchemy.engine import Engine

import vane_dagster as vd
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.orchestration.run import RunContext, run_pipeline
from vane_dagster.orchestration.run_options import RunOptions

STAGES = ("clean", "embedded", "labels")
ROWS = 200
COLUMNS = 4


class Embed:
    """A model that costs nothing."""

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        texts = batch["text"].to_pylist()
        kept = {name: batch[name] for name in batch.column_names if name.startswith("c")}
        return {"vector": [[float(len(text)), 1.0] for text in texts], "label": texts, **kept}


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--postgres", help="URL of an empty database")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(_CHILDREN[given.child](Path.cwd(), given)))
        return
    here = Path(__file__).resolve().parents[1]
    checkouts = {"this": here} | ({"other": given.against.resolve()} if given.against else {})
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="ve-", dir="/tmp") as folder:
        _write_source(Path(folder), given.partitions)
        for repeat in range(given.repeat):
            for name, checkout in checkouts.items():
                root = Path(folder) / f"{name}{repeat}"
                for kind in _CHILDREN:
                    measured = _child(kind, root, checkout, given)
                    found.setdefault((kind, name), []).append(measured)
    print(f"{given.partitions} partitions of {len(STAGES)} stages; medians a partition")
    for (kind, name), runs in found.items():
        cells = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        shown = ", ".join(f"{key} {value / given.partitions:.5g}" for key, value in cells.items())
        print(f"{kind} ({name}): {shown}")
    if given.against:
        for kind in _CHILDREN:
            pairs = zip(found[kind, "this"], found[kind, "other"])
            ratios = [{key: ours[key] / theirs[key] for key in ours} for ours, theirs in pairs]
            cells = {key: statistics.median(each[key] for each in ratios) for key in ratios[0]}
            shown = ", ".join(f"{key} {value:.2f}" for key, value in cells.items())
            print(f"{kind}, this / other: {shown}")


def _pipeline(root: Path, keys: Sequence[str]) -> vd.Pipeline:
    pipeline = vd.Pipeline(
        "docs",
        source=vd.parquet(str(root.parent / "source" / "{partition_key}")),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(list(keys)),
    )
    columns = [f"c{number}" for number in range(COLUMNS)]
    clean = pipeline.project("clean", ["text", *columns])
    schema = {"vector": "FLOAT[2]", "label": "VARCHAR", **dict.fromkeys(columns, "BIGINT")}
    embedded = clean.map_batches("embedded", Embed, schema=schema)
    embedded.project("labels", ["label", "vector", *columns])
    return pipeline


def _keys(count: int) -> list[str]:
    return [f"p{number:06}" for number in range(count)]


def _write_source(root: Path, partitions: int) -> None:
    texts = [f"text {row}" for row in range(ROWS)]
    columns = {f"c{number}": range(ROWS) for number in range(COLUMNS)}
    table = pa.table({"id": range(ROWS), "text": texts, **columns})
    for key in _keys(partitions):
        folder = root / "source" / key
        folder.mkdir(parents=True)
        pq.write_table(table, folder / "0.parquet")


def _child(kind: str, root: Path, checkout: Path, given: argparse.Namespace) -> dict[str, float]:
    """Measure in a separate process, with the package of a checkout."""
    root.mkdir(exist_ok=True)
    options = ["--partitions", str(given.partitions), "--child", kind]
    options += ["--postgres", given.postgres] if given.postgres else []
    done = subprocess.run(
        [sys.executable, __file__, *options],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(checkout), "DAGSTER_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _bare(root: Path, given: argparse.Namespace) -> dict[str, float]:
    keys = _keys(given.partitions)
    store = vd.FragmentStore(root=str(root / "bare")).open()
    pipeline = _pipeline(root, keys)
    start = time.perf_counter()
    context = RunContext(store, "run", CheckRunner(pipeline, store))
    run_pipeline(context, pipeline, STAGES, keys, vd.LocalCompute(), RunOptions())
    return {"seconds": time.perf_counter() - start}


def _run(root: Path, given: argparse.Namespace) -> dict[str, float]:
    keys = _keys(given.partitions)
    resources = {
        "compute": vd.LocalCompute(),
        "store": vd.FragmentStore(root=str(root / "store")),
    }
    assets = _pipeline(root, keys).build_assets()
    edges = {"start": keys[0], "end": keys[-1]}
    statements: Counter[str] = Counter()

    def executed(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        statements[statement] += 1

    with _instance(root, given.postgres) as instance:
        before = _bytes(root, instance)
        sqlalchemy.event.listen(Engine, "before_cursor_execute", executed)
        result = dg.materialize(
            [assets],
            instance=instance,
            resources=resources,
            tags={f"dagster/asset_partition_range_{edge}": key for edge, key in edges.items()},
        )
        sqlalchemy.event.remove(Engine, "before_cursor_execute", executed)
        size = _bytes(root, instance) - before
        (stats,) = instance.get_run_step_stats(result.run_id)
        events = len(instance.all_logs(result.run_id))
    assert stats.start_time is not None
    assert stats.end_time is not None
    seconds = stats.end_time - stats.start_time
    return {
        "seconds": seconds,
        "bytes": size,
        "events": events,
        "statements": sum(statements.values()),
    }


@contextmanager
def _instance(root: Path, postgres: str | None) -> Iterator[dg.DagsterInstance]:
    with tempfile.TemporaryDirectory(dir=root) as home:
        if postgres:
            engine = sqlalchemy.create_engine(postgres, isolation_level="AUTOCOMMIT")
            with engine.connect() as connection:
                connection.execute(sqlalchemy.text("DROP SCHEMA public CASCADE"))
                connection.execute(sqlalchemy.text("CREATE SCHEMA public"))
            engine.dispose()
            config = {"storage": {"postgres": {"postgres_url": postgres}}}
            (Path(home) / "dagster.yaml").write_text(json.dumps(config))
        with dg.DagsterInstance.from_config(home) as instance:
            yield instance


def _bytes(root: Path, instance: dg.DagsterInstance) -> int:
    storage: Any = instance.event_log_storage
    if storage.is_run_sharded:
        folder = Path(instance.root_directory) / "history" / "runs"
        return sum(file.stat().st_size for file in folder.glob("*.db*"))
    with storage.index_connection() as connection:
        query = sqlalchemy.text("SELECT pg_database_size(current_database())")
        return int(connection.execute(query).scalar())


_CHILDREN = {"bare": _bare, "run": _run, "again": _run}

if __name__ == "__main__":
    main()
