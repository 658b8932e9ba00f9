"""Which rows are computed again after a change, and what row keys cost.

``python -m benchmarks.row_reuse`` writes tables to a temporary folder. For each case it computes
them, changes something, runs the pipeline again, and prints how many rows the model saw. Every
output is compared with the one that the model would compute. ``--overhead`` measures a first run
with and without row keys instead.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd
from benchmarks.report import machine
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.orchestration.run import RunContext, run_pipeline
from vane_dagster.orchestration.run_options import RunOptions

LETTERS = 600
FILES = 4
FIRST_DAY = date(2026, 1, 1)
SNAPSHOTS = 30
SEEN = "VANE_BENCHMARK_SEEN"
MODULE = "row_reuse_model"
MODEL = '''"""The model of the benchmark."""

import os
import time
import zlib


class Label:
    """Computes a checksum of each text, at the speed of a model."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, batch):
        texts = batch["text"].to_pylist()
        with open(os.environ["VANE_BENCHMARK_SEEN"], "ab", buffering=0) as seen:
            seen.write(b"%d\\n" % len(texts))
        time.sleep(self.seconds * len(texts))
        return {"label": [zlib.crc32(text.encode()) for text in texts]}
'''

Edit = Callable[["World"], None]


@dataclass
class World:
    """Tables, code and a store, as a user has them.

    Attributes:
        root: The folder of everything.
        rows: The number of rows of a table.
        seconds: What the model takes for a row.
        days: The number of partitions; 0 for a table without partitions.
        hours: The number of partitions once the table is partitioned by hours; 0 before.
        selected: The partitions of the next run, by number.
        columns: The columns of the stage before the model.
        options: Options of the pipeline.
        reuse: How the stage of the model reuses results.
        offset: What the model adds to each checksum.
        store: The name of the store.
    """

    root: Path
    rows: int
    seconds: float
    days: int = 0
    hours: int = 0
    selected: range = range(1)
    columns: dict[str, str] = field(default_factory=lambda: {"id": "id", "text": "trim(text)"})
    options: dict[str, Any] = field(default_factory=dict)
    reuse: Literal["rows", "fragments"] = "rows"
    offset: int = 0
    store: str = "store"

    def __post_init__(self) -> None:
        self.code = self.root / "code"
        self.code.mkdir(parents=True)
        (self.code / f"{MODULE}.py").write_text(MODEL)
        self.random = np.random.default_rng(7)
        self._numbers = itertools.count()
        table = self.texts(self.rows)
        for day in range(max(1, self.days)):
            table = table if day == 0 else changed(self, table, 0.02)
            self.write(split(table, FILES), day)

    @property
    def keys(self) -> list[str | None]:
        """The keys of all partitions."""
        start = datetime.combine(FIRST_DAY, datetime.min.time())
        hours = [start + timedelta(hours=hour) for hour in range(self.hours)]
        days = [str(FIRST_DAY + timedelta(day)) for day in range(self.days)]
        return [f"{hour:%Y-%m-%d-%H:%M}" for hour in hours] or [*days] or [None]

    def folder(self, day: int = 0) -> Path:
        """Return the folder of a partition's files."""
        return self.root / "table" / (self.keys[day] or "all")

    def texts(self, rows: int) -> pa.Table:
        """Return new rows with ids of their own."""
        numbers = [next(self._numbers) for _ in range(rows)]
        noise = self.random.bytes(rows * LETTERS // 2).hex()
        texts = [noise[start : start + LETTERS] for start in range(0, rows * LETTERS, LETTERS)]
        return pa.table({"id": pa.array(numbers, pa.int64()), "text": texts})

    def write(self, tables: Sequence[pa.Table], day: int = 0, **options: Any) -> None:
        """Replace the files of a partition."""
        folder = self.folder(day)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        for number, table in enumerate(tables):
            pq.write_table(table, folder / f"{number}.parquet", **options)

    def read(self, day: int = 0) -> pa.Table:
        """Return the rows of a partition, in the order of its files."""
        return pa.concat_tables(pq.read_table(path) for path in sorted(self.folder(day).iterdir()))

    def pipeline(self) -> vd.Pipeline:
        """Declare the pipeline with the code as it is now."""
        sys.modules.pop(MODULE, None)
        importlib.invalidate_caches()
        model = importlib.import_module(MODULE)
        days = dg.DailyPartitionsDefinition(
            str(FIRST_DAY), end_date=str(FIRST_DAY + timedelta(max(1, self.days)))
        )
        hours = dg.HourlyPartitionsDefinition(
            f"{FIRST_DAY}-00:00", end_date=f"{FIRST_DAY + timedelta(1)}-00:00"
        )
        pipeline = vd.Pipeline(
            "texts",
            source=vd.parquet(
                str(self.root / "table" / ("{partition_key}" if self.days else "all"))
            ),
            id="id",
            partitions_def=hours if self.hours else days if self.days else None,
            **self.options,
        )
        pipeline.project("clean", self.columns).map_batches(
            "label",
            model.Label,
            schema={"label": "BIGINT"},
            columns=["text"],
            fn_constructor_kwargs={"seconds": self.seconds},
            batch_size=1024,
            concurrency=2,
            reuse=self.reuse,
        )
        return pipeline

    def run(self) -> tuple[int, float]:
        """Materialize everything; return the rows that the model saw, and the run's seconds."""
        seen = self.root / "seen"
        seen.write_bytes(b"")
        os.environ[SEEN] = str(seen)
        store = vd.FragmentStore(root=str(self.root / self.store))
        resources = {"compute": vd.LocalCompute(), "store": store}
        keys = self.keys[self.selected.start : self.selected.stop]
        edges = {"start": keys[0], "end": keys[-1]}
        tags = {f"dagster/asset_partition_range_{edge}": str(key) for edge, key in edges.items()}
        started = time.perf_counter()
        pipeline = self.pipeline()
        dg.materialize(
            [pipeline.build_assets()], resources=resources, tags=tags if self.days else {}
        )
        seconds = time.perf_counter() - started
        for day, key in zip(self.selected, keys):
            given, found = self.read(day), vd.load("texts/label", key, store=store)
            texts = dict(zip(*(given.column(name).to_pylist() for name in ("id", "text"))))
            expected = {id: zlib.crc32(text.encode()) + self.offset for id, text in texts.items()}
            labels = zip(*(found.column(name).to_pylist() for name in ("id", "label")))
            assert dict(labels) == expected, "the results are not those of the model"
        return sum(map(int, seen.read_text().split())), seconds


def split(table: pa.Table, files: int) -> list[pa.Table]:
    """Cut a table into files of about the same size."""
    edges = [table.num_rows * n // files for n in range(files + 1)]
    return [table.slice(start, stop - start) for start, stop in itertools.pairwise(edges)]


def changed(world: World, table: pa.Table, share: float) -> pa.Table:
    """Give a share of the rows of a table another text."""
    places = world.random.permutation(table.num_rows)[: int(share * table.num_rows)]
    texts = table.column("text").to_pylist()
    for place, text in zip(places.tolist(), world.texts(len(places)).column("text").to_pylist()):
        texts[place] = text
    return table.set_column(1, "text", [texts])


def rewritten(edit: Callable[[World, pa.Table], pa.Table], **options: Any) -> Edit:
    """Return the edit that rewrites the files with other rows, or in another way.

    Args:
        edit: Returns the rows.
        **options: Options of Parquet.
    """
    return lambda world: world.write(split(edit(world, world.read()), FILES), **options)


def cut_into(files: int) -> Edit:
    """Return the edit that divides the same rows into other files."""
    return lambda world: world.write(split(world.read(), files))


def inserted(world: World, table: pa.Table) -> pa.Table:
    """Insert 1% of rows into the middle."""
    middle = table.num_rows // 2
    new = world.texts(table.num_rows // 100)
    return pa.concat_tables([table.slice(0, middle), new, table.slice(middle)])


def removed(world: World, table: pa.Table) -> pa.Table:
    """Remove each 100th row."""
    return table.filter(np.arange(table.num_rows) % 100 != 0)


def reordered(world: World, table: pa.Table) -> pa.Table:
    """Shuffle the rows."""
    return table.take(world.random.permutation(table.num_rows))


def repeated(world: World) -> None:
    """Replace the rows by new ones, four of each, in 32 shuffled files."""
    texts = world.texts(world.rows // 4).column("text").to_pylist()
    table = world.texts(len(texts) * 4).set_column(1, "text", [texts * 4])
    world.write(split(reordered(world, table), 32))


def moved(world: World) -> None:
    """Rename the files."""
    for path in sorted(world.folder().iterdir()):
        path.rename(path.with_name(f"moved-{path.name}"))


def touched(world: World) -> None:
    """Set the files' modification times."""
    for path in world.folder().iterdir():
        os.utime(path)


def with_columns(**columns: str) -> Edit:
    """Return the edit of the stage before the model."""

    def edit(world: World) -> None:
        world.columns |= columns

    return edit


def with_options(**options: Any) -> Edit:
    """Return the edit of the pipeline's options."""

    def edit(world: World) -> None:
        world.options |= options

    return edit


def code(old: str, new: str, offset: int = 0) -> Edit:
    """Return an edit of the model's code.

    Args:
        old: The text to replace.
        new: The text in its place.
        offset: What the model then adds to each checksum.
    """

    def edit(world: World) -> None:
        path = world.code / f"{MODULE}.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        world.offset = offset

    return edit


def next_day(world: World) -> None:
    """Compute the second partition."""
    world.selected = range(1, 2)


def by_hours(world: World) -> None:
    """Partition the table by hours."""
    tables = split(world.read(), 24)
    world.hours, world.selected = 24, range(24)
    for hour, table in enumerate(tables):
        world.write([table], hour)


@dataclass(frozen=True)
class Case:
    """A change between two runs.

    Attributes:
        title: What changed.
        edit: Changes it.
        allowed: The share of the rows that the model may see in the second run.
        days: See `World`.
        options: See `World`.
    """

    title: str
    edit: Edit
    allowed: float = 0.0
    days: int = 0
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "changed": Case(
        "every file rewritten, 1% of its rows changed",
        rewritten(lambda world, table: changed(world, table, 0.01)),
        0.011,
    ),
    "inserted": Case("1% of rows inserted in the middle", rewritten(inserted), 0.01),
    "removed": Case("1% of rows removed", rewritten(removed)),
    "reordered": Case("all rows reordered", rewritten(reordered)),
    "shuffled": Case(
        "all rows reordered, fragments of 500 rows",
        rewritten(reordered),
        options={"fragment_rows": 500},
    ),
    "column": Case(
        "a column added upstream, which the stage does not read",
        with_columns(letters="length(text)"),
    ),
    "refactored": Case(
        "an upstream stage refactored, with equal results", with_columns(text="ltrim(rtrim(text))")
    ),
    "comments": Case(
        "comments and formatting of the stage's own code",
        code("        texts = ", "\n        # All texts of the batch.\n        texts = "),
    ),
    "moved": Case("files moved", moved),
    "touched": Case("files touched", touched),
    "merged": Case("files merged into one", cut_into(1)),
    "split": Case("files split into 16", cut_into(16)),
    "encoded": Case(
        "files encoded anew: zstd, row groups of 1,000 rows",
        rewritten(lambda world, table: table, compression="zstd", row_group_size=1000),
    ),
    "fragments": Case("`fragment_rows` changed", with_options(fragment_rows=3000)),
    "hours": Case("partitioned by hours, no longer by days", by_hours, 1.0, 1),
    "snapshot": Case("today's snapshot of yesterday's table, 2% changed", next_day, 0.02, 2),
    # Up to 12 files are in flight at a time, and each may compute a text.
    "repeated": Case("new rows, four of each, in 32 shuffled files", repeated, 0.6),
    "own": Case("the stage's own code changed", code(".encode())", ".encode()) + 1", 1), 1.0),
}
BACKFILL = "backfill"


@dataclass(frozen=True)
class Result:
    """What one case took.

    Attributes:
        title: The case.
        rows: The rows of the second run.
        calls: The rows that the model saw in it.
        allowed: The rows that it may see.
        first: Seconds without stored rows.
        seconds: Seconds of the run.
    """

    title: str
    rows: int
    calls: int
    allowed: int
    first: float
    seconds: float


def measure(name: str, root: Path, rows: int, seconds: float, days: int = SNAPSHOTS) -> Result:
    """Run a case.

    Args:
        name: A key of `CASES`, or `BACKFILL`.
        root: An empty folder.
        rows: The number of rows of a table.
        seconds: What the model takes for a row.
        days: The number of partitions of the backfill.
    """
    sys.path.insert(0, str(root / "code"))
    try:
        if name == BACKFILL:
            world = World(root, rows, seconds, days, selected=range(days), reuse="fragments")
            _, first = world.run()
            world.reuse, world.store = "rows", "other"
            calls, again = world.run()
            title = f"{days} daily snapshots in one backfill, 2% changed each"
            allowed = rows + (days - 1) * int(0.02 * rows)
            return Result(title, rows * days, calls, allowed, first, again)
        case = CASES[name]
        world = World(root, rows, seconds, case.days, options=dict(case.options))
        _, first = world.run()
        case.edit(world)
        calls, again = world.run()
        given = sum(world.read(number).num_rows for number in world.selected)
        return Result(case.title, given, calls, int(case.allowed * rows), first, again)
    finally:
        sys.path.remove(str(root / "code"))


# Overhead


def shout(batch: pa.Table) -> dict[str, Any]:
    """A function that costs almost nothing."""
    return {"out": np.zeros(batch.num_rows, np.int64)}


def wait(batch: pa.Table) -> dict[str, Any]:
    """A model that takes 10 us a row."""
    time.sleep(10e-6 * batch.num_rows)
    return {"out": np.zeros(batch.num_rows, np.int64)}


def first_run(root: Path, fn: Callable[..., Any], reuse: Literal["rows", "fragments"]) -> float:
    """Return the seconds of a run with an empty store.

    Args:
        root: A folder with the source.
        fn: The function.
        reuse: How its stage reuses results.
    """
    pipeline = vd.Pipeline("texts", source=vd.parquet(str(root / "table")), id="id")
    options: dict[str, Any] = {"columns": ["text"], "batch_size": 8192, "concurrency": 1}
    pipeline.map_batches("out", fn, schema={"out": "BIGINT"}, reuse=reuse, **options)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        store = vd.FragmentStore(root=folder).open()
        started = time.perf_counter()
        context = RunContext(store, "run", CheckRunner(pipeline, store))
        run_pipeline(context, pipeline, ["out"], [None], vd.LocalCompute(num_cpus=2), RunOptions())
        return time.perf_counter() - started


def write_texts(folder: Path, rows: int) -> None:
    """Write files of 250,000 rows.

    Args:
        folder: The folder, which does not exist yet.
        rows: The number of rows.
    """
    folder.mkdir()
    random = np.random.default_rng(7)
    for start in range(0, rows, 250_000):
        count = min(250_000, rows - start)
        lengths = random.integers(LETTERS - 50, LETTERS + 50, count)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        letters = random.integers(97, 123, offsets[-1], np.uint8)
        texts = pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(letters))
        table = pa.table({"id": np.arange(start, start + count), "text": texts})
        pq.write_table(table, folder / f"{start:09}.parquet", use_dictionary=False)


def overhead(root: Path, rows: int, pairs: int) -> None:
    """Print the seconds of first runs with and without row keys, in turns.

    Args:
        root: An empty folder.
        rows: The number of rows.
        pairs: The number of runs of each.
    """
    write_texts(root / "table", rows)
    print(f"First runs over {rows:,} texts of about {LETTERS} bytes, one worker.\n")
    print(
        "| function | without row keys | with row keys | us a row | ratio |\n|---|---|---|---|---|"
    )
    for title, fn in (("none, trivial", shout), ("10 us a row", wait)):
        found = []
        for pair in range(pairs):
            modes: Any = ("fragments", "rows")[:: 1 if pair % 2 else -1]
            seconds = {mode: first_run(root, fn, mode) for mode in modes}
            found.append((seconds["fragments"], seconds["rows"]))
        without, keyed = (statistics.median(column) for column in zip(*found))
        extra = statistics.median((b - a) / rows * 1e6 for a, b in found)
        ratio = statistics.median(b / a for a, b in found)
        print(f"| {title} | {without:.1f} s | {keyed:.1f} s | {extra:.2f} | {ratio:.3f} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements and print them."""
    names = (*CASES, BACKFILL)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, help="of a table; default: 100,000, or 4 million")
    parser.add_argument("--seconds", type=float, default=100e-6, help="of the model for a row")
    parser.add_argument("--days", type=int, default=SNAPSHOTS, help="partitions of the backfill")
    parser.add_argument("--only", action="append", choices=names, help="a case")
    parser.add_argument("--overhead", action="store_true", help="measure first runs")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each kind for --overhead")
    parser.add_argument("--temp", help="parent of the temporary folder")
    given = parser.parse_args(arguments)
    found = machine()
    print(
        f"{found['cores']} cores ({found['cpu']}), {found['memory']}, Python {found['python']}.\n"
    )
    with tempfile.TemporaryDirectory(dir=given.temp) as folder:
        if given.overhead:
            overhead(Path(folder), given.rows or 4_000_000, given.pairs)
            return
        print(
            "| case | rows | calls | allowed | computing all | this run |\n"
            "|---|---|---|---|---|---|"
        )
        for name in given.only or names:
            rows = (given.rows or 100_000) // (10 if name == BACKFILL else 1)
            one = measure(name, Path(folder) / name, rows, given.seconds, given.days)
            print(
                f"| {one.title} | {one.rows:,} | {one.calls:,} | {one.allowed:,} | "
                f"{one.first:.1f} s | {one.seconds:.1f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
