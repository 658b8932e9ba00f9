"""Failed rows by kind of error."""

from __future__ import annotations

import json
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

import vane_dagster as vd
from vane_dagster.cli.main import main


def check(batch: Any) -> Any:
    for number in batch["n"].to_pylist():
        if number % 3 == 0:
            raise ValueError(f"{number} is divisible by '3'")
        if number == 7:
            raise RuntimeError("seven")
    return {"y": batch["n"]}


@pytest.fixture
def store(tmp_path, materialize) -> str:
    rows = [{"id": n, "n": n, "part": "ab"[n % 2]} for n in range(1, 17)]
    numbers = vd.Pipeline(
        "numbers",
        source=vd.table(rows, partition_column="part"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
    )
    numbers.map_batches("checked", check, schema={"y": "BIGINT"}, on_error="quarantine")
    for key in ("a", "b"):
        materialize(numbers, vd.LocalCompute(), key)
    return str(tmp_path / "store")


def test_failed_rows_are_grouped_by_kind_of_error(store):
    def run(*words: str) -> str:
        done = CliRunner().invoke(main, ["quarantine", "numbers/checked", "--store", store, *words])
        assert done.exit_code == 0, done.output
        return done.output

    assert run().splitlines() == [
        "5 rows: ValueError: 6 is divisible by '3'",
        "  ids: 6, 12, 3 and 2 more",
        "  partitions: a, b",
        "1 row: RuntimeError: seven",
        "  ids: 7",
        "  partitions: b",
        "Retry them: materialize the stage with retry_quarantined: true in the config.",
    ]
    (group,) = json.loads(run("--partition", "a", "--json"))
    assert (group["rows"], group["ids"], group["partitions"]) == (2, [6, 12], ["a"])
