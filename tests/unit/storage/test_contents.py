"""What a store holds, as the commands show it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

import vane_dagster as vd
from support.data import partitioned
from support.in_process import compute
from vane_dagster.cli.main import main
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Store:
    """Two stages of a pipeline in two partitions, one with a former version; another pipeline."""
    root = str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"
    made = Store(StoragePath(root))
    for rows, partitions in ((3, ["a"]), (5, ["a", "DE / 3"])):
        compute(docs("docs", rows), made, partitions)
    compute(docs("more", 1), made, ["a"])
    return made


def docs(name: str, rows: int) -> vd.Pipeline:
    keys = ["a", "DE / 3"]
    given = [{"id": n, "day": key} for key in keys for n in range(rows)]
    made = partitioned(vd.table(given, partition_column="day"), keys, name)
    made.project("all", ["id"]).project("some", ["id"], where="id > 0")
    return made


def test_the_commands_print_tables_and_json(store):
    if store.root.url.startswith("memory"):
        pytest.skip("one file system is enough")

    def call(*words: str) -> str:
        done = CliRunner().invoke(main, ["store", words[0], store.root.url, *words[1:]])
        assert done.exit_code == 0, done.output
        return str(done.output)

    assert "docs/some  -          2           8     2" in call("ls")
    assert "DE / 3" in call("ls", "docs/some")
    lines = [json.loads(line) for line in call("ls", "docs/some", "--json").splitlines()]
    assert sorted(each["partition"] for each in lines) == ["DE / 3", "a"]
    collected = call("gc", "--json", "--keep", "0s", "--dry-run").splitlines()
    assert [json.loads(line)["stage"] for line in collected][:2] == ["docs/all", "docs/some"]
    wrong = CliRunner().invoke(main, ["store", "ls", store.root.url, "absent", "--json"])
    assert (wrong.exit_code, "no stage at 'absent'" in wrong.output) == (1, True)
