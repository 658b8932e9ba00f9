"""Memory stays bounded whatever the input's size: nothing holds a partition."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from support import forked, memory_run
from support.data import read_stage, write_source
from support.paths import TESTS

STORE_BYTES = 256 << 20


@pytest.fixture(scope="module", autouse=True)
def _head(_home: None) -> Iterator[None]:
    """The head with a small object store, which the first run starts."""
    yield
    from vane_dagster.compute.local_head import LocalHead

    LocalHead(name="small").stop()


def check_run(root: Path, case: str, fragment_rows: int) -> None:
    """Materializes a case in a process of its own, which must not grow, nor make Ray spill."""
    options = {"case": case, "fragment_rows": fragment_rows, "store_bytes": STORE_BYTES}
    given = json.dumps({"root": str(root), **options})
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = forked.run([memory_run.__file__, given], env, TESTS, 280)

    lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    facts = json.loads(lines[0].removeprefix("FACTS "))
    assert facts["success"]
    spilled = [re.findall("Spilled .*", facts[when]) for when in ("before", "after")]
    assert spilled[0] == spilled[1], facts["after"]
    assert facts["driver_bytes"] < 100 << 20


def test_a_stage_that_makes_a_hundred_times_the_bytes_does_not_spill(tmp_path: Path):
    rows, width, fragment = 1_600, 500, 200
    payload = (np.arange(rows * width) % 251).astype("f4").reshape(rows, width)
    table = {"id": range(rows), "payload": list(payload)}
    write_source(tmp_path / "src", table, row_group_size=fragment, use_dictionary=False)
    made = rows * width * 4 * 100
    at_once = 2 * made // (rows // fragment)  # slices, and what they are gathered to
    assert 3 * at_once < STORE_BYTES < made

    check_run(tmp_path, "hundredfold", fragment)

    sums = read_stage(tmp_path / "store", "big", "sums").sort_by("id")
    assert sums.column("id").to_pylist() == list(range(rows))
    assert np.array_equal(sums.column("sum").to_numpy(), 100 * payload.sum(axis=1, dtype="f8"))


def test_rows_of_a_kilobyte_to_fifty_megabytes_do_not_spill(tmp_path: Path):
    random = np.random.default_rng(7)
    sizes = np.exp(random.uniform(np.log(1_000), np.log(50_000), 3_000)).astype(int)
    sizes[[1050, 1111, 1290, 1399]] = [40_000_000, 48_000_000, 50_000_000, 45_000_000]
    payload = [random.bytes(size) for size in sizes]
    table = pa.table({"id": range(len(sizes)), "payload": pa.array(payload, pa.binary())})
    write_source(tmp_path / "src", table, row_group_size=100, use_dictionary=False)

    check_run(tmp_path, "mixed", 100)

    joined = read_stage(tmp_path / "store", "big", "joined").sort_by("id")
    digests = [hashlib.sha256(value).hexdigest() for value in payload]
    assert joined.column("digest").to_pylist() == digests
    for column in ("payload", "copy"):
        found = [hashlib.sha256(v.as_buffer()).hexdigest() for v in joined.column(column)]
        assert found == digests, column
