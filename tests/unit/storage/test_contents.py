"""What a store holds, as the commands show it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from click.testing import CliRunner

import vane_dagster as vd
from support.data import partitioned
from support.in_process import compute
from vane_dagster.cli.main import main
from vane_dagster.storage import contents
from vane_dagster.storage.batch_records import BatchFolder, ProviderBatch
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.gc import GcPolicy, collect
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


def test_the_commands_print_tables_and_json(store, tmp_path):
    if store.root.url.startswith("memory"):
        pytest.skip("one file system is enough")

    def call(*words: str) -> str:
        done = CliRunner().invoke(main, ["store", words[0], store.root.url, *words[1:]])
        assert done.exit_code == 0, done.output
        return str(done.output)

    (tmp_path / "docs" / "input of some").mkdir()  # as a preview makes it, on a local disk
    assert "docs/some  -          2           8     2" in call("ls")
    assert "input of" not in call("ls")
    assert "DE / 3" in call("ls", "docs/some")
    lines = [json.loads(line) for line in call("ls", "docs/some", "--json").splitlines()]
    assert sorted(each["partition"] for each in lines) == ["DE / 3", "a"]
    collected = call("gc", "--json", "--keep", "0", "--dry-run").splitlines()
    assert [json.loads(line)["stage"] for line in collected][:2] == ["docs/all", "docs/some"]
    wrong = CliRunner().invoke(main, ["store", "ls", store.root.url, "absent", "--json"])
    assert (wrong.exit_code, "no stage at 'absent'" in wrong.output) == (1, True)


@pytest.mark.parametrize("options", [["a"], ["--before", "b", "--dry-run"]])
def test_forgotten_partitions_are_computed_again_and_their_parts_collected(tmp_path, options):
    made = Store(StoragePath(str(tmp_path)))
    compute(docs("docs", 3), made, ["a", "DE / 3"])
    asked = ["store", "forget", made.root.url, "docs", *options]

    done = CliRunner().invoke(main, asked)

    missing = "such partition" if "--before" in options else "partition 'a'"
    would = " would be" if "--dry-run" in options else ""
    counted = "2 partitions" if would else "1 partition"
    assert f"docs/all: {counted}{would} forgotten, {'6' if would else '3'} rows" in done.output
    left = {each.partition for each in contents.results(made, "docs/some")}
    assert left == ({"a", "DE / 3"} if would else {"DE / 3"})
    if not would:
        absent = CliRunner().invoke(main, asked)
        assert (absent.exit_code, f"has no {missing} of 'docs'" in absent.output) == (1, True)
        marked = list(collect(made, GcPolicy(time.time() + 1, keep=0, grace=0)))
        assert sorted(len(each.condemned) for each in marked if "docs/" in each.stage) == [1, 1]


@pytest.mark.parametrize(
    ("words", "left"), [([], set()), (["a"], {"DE / 3"}), (["--before", "E"], {"a"})]
)
def test_one_stage_is_forgotten(tmp_path, words, left):
    made = Store(StoragePath(str(tmp_path)))
    compute(docs("docs", 3), made, ["a", "DE / 3"])
    done = CliRunner().invoke(main, ["store", "forget", made.root.url, "docs/some", *words])
    assert f"docs/some: {2 - len(left)} partition" in done.output, done.output
    assert {each.partition for each in contents.results(made, "docs/some")} == left
    assert len([*contents.results(made, "docs/all")]) == 2


def test_a_stage_without_partitions_is_forgotten_but_no_whole_pipeline(tmp_path):
    made = Store(StoragePath(str(tmp_path)))
    one = vd.Pipeline("one", source=vd.table({"id": [1]}), id="id")
    one.project("old", ["id"])
    compute(one, made, [None])
    assert not [*contents.forget(made, "one", [])]
    assert [each.rows for each in contents.forget(made, "one/old", [])] == [1]
    assert not [*contents.results(made, "one/old")]


def test_a_whole_stage_is_forgotten_with_what_has_no_version(tmp_path):
    made = Store(StoragePath(str(tmp_path)))
    compute(docs("docs", 3), made, ["a"])
    folder = BatchFolder(made, "docs", "old")
    batch = ProviderBatch("m", 0.0, "r", 1, ("a",), ("old",), name="b")
    folder.add(batch, {"0" * 32: "{}"})
    failed = made.root.child("docs", "old", "failed", "a")
    failed.write("none-0001.parquet", b"")
    assert [each.partitions for each in contents.forget(made, "docs/old", [], dry_run=True)] == [
        0,
        0,
    ]
    assert folder.batches()
    done = CliRunner().invoke(main, ["store", "forget", made.root.url, "docs/old"])
    assert "docs/old: 0 partitions forgotten" in done.output
    assert not folder.path.names()
    assert not failed.names()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["docs"], 2, "name partitions of 'docs' or give --before, or name one of its stages"),
        (["docs", "a", "b", "2026"], 1, "has no partition 'b', '2026' of 'docs'"),
    ],
)
def test_forget_names_what_it_lacks(tmp_path, words, code, message):
    made = Store(StoragePath(str(tmp_path)))
    compute(docs("docs", 3), made, ["a"])
    done = CliRunner().invoke(main, ["store", "forget", made.root.url, *words])
    assert (done.exit_code, message in done.output) == (code, True), done.output
    assert len([*contents.results(made, "docs/some")]) == (1 if code == 2 else 0)
