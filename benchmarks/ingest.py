"""Converts CSV files into Parquet: the first run of `vd.csv` against `pyarrow.csv` alone.

``python -m benchmarks.ingest [--files 2] [--gigabytes 1] [--repeat 3] [--temp FOLDER]``

Each conversion is a process of its own, in turns. `pyarrow` reads each file by `open_csv` and
writes what it reads; ours also finds the types of all values, and keeps each row's number.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq

_ROWS = 200_000
_BLOCK = 16 << 20


def write(path: Path, size: int, seed: int) -> None:
    """Write a CSV file of some bytes, with texts, numbers and dates."""
    random = np.random.default_rng(seed)
    words = np.array([f"word{n}" for n in range(5_000)])
    first = 0
    with path.open("wb") as file:
        while file.tell() < size:
            days = pa.array(random.integers(18_000, 20_000, _ROWS, dtype=np.int32))
            rows = {
                "id": np.arange(first, first + _ROWS),
                "text": [" ".join(each) for each in words[random.integers(0, 5_000, (_ROWS, 8))]],
                "score": random.random(_ROWS),
                "count": random.integers(0, 1_000, _ROWS),
                "day": days.cast(pa.date32()),
                "label": words[random.integers(0, 20, _ROWS)],
            }
            options = arrow_csv.WriteOptions(include_header=first == 0)
            arrow_csv.write_csv(pa.table(rows), file, options)
            first += _ROWS


def by_arrow(source: Path, target: Path) -> int:
    """Convert the files by `pyarrow.csv`; return the number of rows."""
    count = 0
    for file in sorted(source.iterdir()):
        options = arrow_csv.ReadOptions(block_size=_BLOCK)
        with (
            arrow_csv.open_csv(file, options) as reader,
            pq.ParquetWriter(target / f"{file.stem}.parquet", reader.schema) as writer,
        ):
            for batch in reader:
                writer.write_batch(batch)
                count += batch.num_rows
    return count


def by_vane(source: Path, target: Path) -> int:
    """Convert the files as the planning of a first run does; return the number of rows."""
    import vane_dagster as vd
    from vane_dagster.sources.base import default_rule
    from vane_dagster.storage.filesystem import StoragePath
    from vane_dagster.storage.store import Store

    own = vd.csv(str(source)).bind(Store(StoragePath(str(target))))
    files = own.required(own.list_files([None], "benchmark")[None], None, "benchmark")
    table = own.split(files, default_rule([]), "benchmark")
    return sum(fragment.stop - fragment.start for fragment in table.fragments)


_CONTENDERS = {"pyarrow": by_arrow, "vane_dagster": by_vane}


def converted(contender: str, source: Path, target: Path) -> dict[str, float]:
    """Convert the files in this process, and measure it."""
    start = time.perf_counter()
    rows = _CONTENDERS[contender](source, target)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "rows": rows,
        "seconds": time.perf_counter() - start,
        "cpu": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss / 1024,
    }


def main() -> int:
    """Write the files, convert them in turns, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of each file")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--temp", help="folder for the files")
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.convert:
        contender, source, target = given.convert
        print(json.dumps(converted(contender, Path(source), Path(target))))
        return 0
    with tempfile.TemporaryDirectory(dir=given.temp) as folder:
        source = Path(folder) / "source"
        source.mkdir()
        for number in range(given.files):
            write(source / f"{number}.csv", int(given.gigabytes * 1e9), number)
        for _ in range(given.repeat):
            found = {}
            for contender in _CONTENDERS:
                with tempfile.TemporaryDirectory(dir=folder) as target:
                    command = ["--convert", contender, str(source), target]
                    run = [sys.executable, "-m", "benchmarks.ingest", *command]
                    printed = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True)
                found[contender] = json.loads(printed.stdout.splitlines()[-1])
                shown = ", ".join(
                    f"{name} {value:,.0f}" for name, value in found[contender].items()
                )
                print(f"{contender}: {shown}", flush=True)
            bare, own = found.values()
            if bare["rows"] != own["rows"]:
                print(f"{own['rows']} rows, expected {bare['rows']}")
                return 1
            ratios = {name: own[name] / bare[name] for name in ("seconds", "cpu", "peak_mib")}
            print(", ".join(f"{name}: factor {ratio:.2f}" for name, ratio in ratios.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
