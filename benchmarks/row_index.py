"""Build a row index and find fragments in it: seconds and peak memory.

``python -m benchmarks.row_index --rows 100_000_000`` writes row records of random keys to a
temporary folder, builds their index, and finds rows of fragments. Anonymous memory is measured
without mapped files. The folder needs 100 bytes a row, and is deleted at the end.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.row_records import RecordedPart, records_schema, write_records
from vane_dagster.worker.row_index import open_index

FRAGMENT = 262_144
FRAGMENTS = 8


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--folder", help="parent of the temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        root = Path(name)
        fragments = -(-given.rows // FRAGMENT)
        parts = [
            _written(root, n, min(FRAGMENT, given.rows - n * FRAGMENT)) for n in range(fragments)
        ]
        indexes = root / "indexes"
        indexes.mkdir(mode=0o700)
        with _measured("build", given.rows):
            index = open_index(parts, 0, indexes)
        rng = np.random.default_rng(1)
        chosen = rng.integers(0, fragments, FRAGMENTS).tolist()
        everything = [_keys(n) for n in chosen]
        spread = [np.concatenate(half) for half in zip(*everything)]
        order = rng.permutation(len(spread[0]))
        shuffled = [half[order] for half in spread]
        missing = [rng.integers(0, 1 << 64, len(order), np.uint64) for _ in range(2)]
        for title, (high, low) in {
            "hits in order": spread,
            "hits at random": shuffled,
            "no hits": missing,
        }.items():
            with _measured(title, len(high)):
                for n in range(0, len(high), FRAGMENT):
                    index.find(high[n : n + FRAGMENT], low[n : n + FRAGMENT], failed=False)


def _keys(number: int, rows: int = FRAGMENT) -> list[np.ndarray]:
    rng = np.random.default_rng([7, number])
    both = rng.integers(0, 1 << 64, (2, FRAGMENT), np.uint64)
    return [both[0, :rows], both[1, :rows]]


def _written(root: Path, number: int, rows: int) -> RecordedPart:
    schema = records_schema(pa.int64())
    first = number * FRAGMENT
    arrays = [pa.array(half) for half in _keys(number, rows)]
    arrays.append(pa.array(np.arange(first, first + rows)))
    arrays += [
        pa.array(np.full(rows, value), field.type) for value, field in zip((0, 1), list(schema)[3:])
    ]
    arrays += [pa.nulls(rows, field.type) for field in list(schema)[5:]]
    location = Location(str(root))
    table = pa.Table.from_arrays(arrays, schema=schema)
    return RecordedPart(location, "", write_records(location, f"{number:06}", table))


@contextmanager
def _measured(title: str, rows: int) -> Iterator[None]:
    """Print seconds and the peak of anonymous and of all resident memory."""
    peaks = {"RssAnon": 0, "VmRSS": 0}
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.02):
            for line in Path("/proc/self/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in peaks:
                    peaks[name] = max(peaks[name], int(value.split()[0]))

    thread = threading.Thread(target=sample)
    thread.start()
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    ended.set()
    thread.join()
    print(
        f"{title:32} {seconds:8.2f} s {seconds / rows * 1e6:7.3f} us/row "
        f"{peaks['RssAnon'] / 1024:8.0f} MiB anonymous {peaks['VmRSS'] / 1024:8.0f} MiB resident",
        flush=True,
    )


if __name__ == "__main__":
    main()
