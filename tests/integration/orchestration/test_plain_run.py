"""Runs without Dagster's events, in the store that Dagster's runs use."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

import vane_dagster as vd
from support.results import metadata
from vane_dagster.errors import DefinitionError, VaneError


class Half:
    def __call__(self, batch: Any) -> Any:
        if 13 in batch["n"].to_pylist():
            raise ValueError("thirteen")
        return {"half": [n / 2 for n in batch["n"].to_pylist()]}


def numbers(last: int = 12) -> vd.Pipeline:
    rows = [{"id": n, "n": n, "part": "ab"[n % 2]} for n in range(1, last + 1)]
    made = vd.Pipeline(
        "numbers",
        source=vd.table(rows, partition_column="part"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
    )
    made.map_batches("halved", Half, schema={"half": "DOUBLE"}).project("last", ["id", "half"])
    return made


def test_a_run_is_printed_and_found_by_dagster(tmp_path, materialize, capsys):
    store = vd.FragmentStore(root=str(tmp_path / "store"))
    numbers().run(store=store)
    printed = capsys.readouterr().out
    assert "halved: partitions: 2 committed; 12 rows in" in printed
    assert "model Half: 1 started in" in printed
    assert vd.load("numbers/last", store=store).num_rows == 12

    numbers().run("a", select="last", store=store)
    assert "last: partitions: 1 up to date (6 rows in 1 fragment)" in capsys.readouterr().out
    done = materialize(numbers(), vd.LocalCompute(), "a")
    assert metadata(done, "halved")["fragments_computed"] == 0

    numbers().run("a", select="last", store=store, force=True)
    assert "last: partitions: 1 committed" in capsys.readouterr().out


def test_a_partition_that_fails_is_an_error_and_the_others_are_committed(tmp_path, capsys):
    store = str(tmp_path / "store")
    with pytest.raises(VaneError, match=r"stage 'numbers/halved', partition 'b'.*thirteen"):
        numbers(14).run(store=store)
    assert "halved: partitions: 1 committed, 1 failed" in capsys.readouterr().out
    assert vd.load("numbers/halved", "a", store=store).num_rows == 7
    with pytest.raises(DefinitionError, match="there is no partition 'c'"):
        numbers().run("c", store=store)
