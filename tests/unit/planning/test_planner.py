"""Plans: fragments, keys, and what is left to do; nothing here runs user code."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from hypothesis import given
from hypothesis import strategies as st

import vane_dagster as vd
from support.data import partitioned, write_source
from support.plans import Scale, docs, keys, missing, plan, settle, source, triple
from support.published import docs as publishing
from vane_dagster.engine.executor import edited
from vane_dagster.planning.definition import pool_identity, stage_definition
from vane_dagster.planning.plan import RunPlan
from vane_dagster.planning.planner import plan_run
from vane_dagster.sources import FragmentRule
from vane_dagster.sources.files import content_hash
from vane_dagster.sources.grouping import _ranges
from vane_dagster.sources.parquet import ParquetSource
from vane_dagster.storage.manifest import FIRST_GENERATION, generation_number, raised


def list_files(source: Any, partition: str | None, location: str) -> Any:
    return source.required(source.list_files([partition], location)[partition], partition, location)


def refusal(planned: RunPlan) -> str:
    (error,) = planned.failed.values()
    assert isinstance(error, vd.errors.PlanError)
    return str(error)


# Fragments


def fragments(tmp_path: Path, rule: FragmentRule, rows: int, group: int) -> list[tuple[int, int]]:
    table = {"id": range(rows), "v": [float(n) for n in range(rows)]}
    write_source(tmp_path / "src", table, row_group_size=group)
    found = vd.parquet(str(tmp_path / "src"))
    footers = found.split(list_files(found, None, "here"), rule, "here")
    return [(f.start, f.stop) for f in footers.fragments]


@pytest.mark.parametrize(
    ("rule", "rows", "group", "edges"),
    [
        (FragmentRule(25), 50, 10, [0, 20, 40, 50]),  # of row groups
        (FragmentRule(30), 100, 100, [0, 25, 50, 75, 100]),  # a big row group is cut evenly
        (FragmentRule(1000, bytes=1), 5, 5, [0, 1, 2, 3, 4, 5]),  # rows larger than the cap
    ],
)
def test_where_fragments_end(rule, rows, group, edges, tmp_path):
    assert fragments(tmp_path, rule, rows, group) == list(pairwise(edges))


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 900)), max_size=12),
    st.integers(1, 60),
    st.integers(1, 1000),
)
def test_ranges_cover_every_row_once(groups, most, max_bytes):
    rows, sizes = [rows for rows, _ in groups], [rows * each for rows, each in groups]
    ranges = list(_ranges(rows, most, sizes, max_bytes))
    edges = [0, *(stop for _, stop in ranges)]
    assert [start for start, _ in ranges] == edges[:-1]
    assert edges[-1] == sum(rows)
    assert all(0 < stop - start <= most for start, stop in ranges)
    above = np.interp(edges, np.cumsum([0, *rows]), np.cumsum([0, *sizes]))
    assert all(
        stop - start == 1 or held <= 2 * max_bytes
        for (start, stop), held in zip(ranges, np.diff(above))
    ), "cut evenly, a piece may have a row more than its share"


ALL = {"clean", "doubled", "scaled", "joined", "out"}
DOUBLED = {"doubled", "joined", "out"}
CHANGES = {
    "an expression": ({"text": "upper(text)"}, ALL),
    "where": ({"where": "n > 0"}, ALL),
    "the function": ({"fn": triple}, DOUBLED),
    "an argument": ({"fn_kwargs": {"by": 3}}, DOUBLED),
    "the version": ({"version": "2"}, DOUBLED),
    "the schema": ({"schema": {"x": "INTEGER"}}, DOUBLED),
    "the columns": ({"columns": ["n"]}, DOUBLED),
    "the format": ({"batch_format": "numpy"}, DOUBLED),
    "the cardinality": ({"cardinality": "filter"}, DOUBLED),
    "a constructor's argument": ({"factor": 4}, {"scaled", "joined", "out"}),
    "how": ({"how": "left"}, {"joined", "out"}),
    "the target": ({"out": "elsewhere"}, {"out"}),
    "compression": ({"compression": "snappy"}, {"out"}),
    "batch_size": ({"batch_size": 7}, set()),
    "concurrency": ({"concurrency": (1, 3)}, set()),
    "max_concurrency": ({"max_concurrency": 2}, set()),
    "num_cpus": ({"num_cpus": 2}, set()),
    "memory": ({"memory": 1000}, set()),
    "resources": ({"resources": {"disk": 1}}, set()),
    "env_vars": ({"env_vars": ["TOKEN"]}, set()),
    "keyed_env_vars": ({"keyed_env_vars": ["TOKEN"]}, DOUBLED),
    "space in a literal": ({"text": "trim(text) || ' '"}, ALL),
    "a description": (
        {"asset": vd.Asset(description="Doubles."), "clean": {"tags": {"a": "b"}}},
        set(),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_change_makes_new(change, tmp_path, store):
    """New keys for the stage and all below it, and for nothing else."""
    changes, expected = CHANGES[change]
    source(tmp_path, {"a.parquet": 10, "b.parquet": 3})
    before = keys(plan(docs(tmp_path, fragment_rows=4), store))
    after = keys(plan(docs(tmp_path, fragment_rows=4, **changes), store))
    different = {s for s in before if not set(before[s]) & set(after[s])}
    same = {s for s in before if before[s] == after[s]}
    assert different == expected
    assert same == ALL - expected


def test_keyed_variables_count_by_their_values(tmp_path, store, monkeypatch):
    source(tmp_path, {"a.parquet": 10})
    given = {"fragment_rows": 4, "keyed_env_vars": ["LANGUAGE_OF_TEST"]}

    def seen() -> tuple[Any, str]:
        made = docs(tmp_path, **given)
        return keys(plan(made, store))["doubled"], pool_identity(made, made["doubled"].spec)

    monkeypatch.delenv("LANGUAGE_OF_TEST", raising=False)
    found = [seen()]
    for value in ("", "de", "en"):
        monkeypatch.setenv("LANGUAGE_OF_TEST", value)
        found.append(seen())
        assert seen() == found[-1]
    assert len({key for key, _ in found}) == len({pool for _, pool in found}) == 4
    assert docs(tmp_path, **given)["doubled"].spec.workers._env_vars == ("LANGUAGE_OF_TEST",)


# Files


def test_a_touched_file_is_the_same_file(tmp_path, store):
    source(tmp_path, {"a.parquet": 3, "b.parquet": 3})
    first = plan(docs(tmp_path), store)
    settle(first, store)
    os.utime(tmp_path / "src/a.parquet", ns=(1, 10**18))
    assert all(s.done for s in plan(docs(tmp_path), store).partitions[0].stages.values())

    source(tmp_path, {"c.parquet": 3})
    grown = plan(docs(tmp_path), store)
    assert missing(grown) == dict.fromkeys(ALL, 1)
    assert set(keys(first)["out"]) < set(keys(grown)["out"])


def test_a_hash_of_a_file_that_changed_meanwhile_is_not_kept(tmp_path, store):
    """Else the new content would pass for the old version in the next run."""
    source(tmp_path, {"a.parquet": 3})
    found = vd.parquet(str(tmp_path / "src"))
    (listed,) = list_files(found, None, "here")
    assert content_hash(listed, found)
    os.utime(tmp_path / "src/a.parquet", ns=(1, 10**18))
    assert content_hash(listed, found) is None
    (tmp_path / "src/a.parquet").unlink()
    assert content_hash(listed, found) is None


# Upstreams that are not selected


def test_what_counts_as_a_source_file(tmp_path):
    rows = {"id": [1]}
    for folder, name in [("", "a.parquet"), ("day=1", "b.parquet"), ("_tmp", "c.parquet"),
                         ("", ".d.parquet"), ("", "_e.parquet"), ("", "f.csv")]:  # fmt: skip
        write_source(tmp_path / "src" / folder, rows, name)

    def listed(url: str, key: str | None = None) -> list[str]:
        files = list_files(vd.parquet(url), key, "here")
        return [os.path.relpath(file.url[len("file://") :], tmp_path / "src") for file in files]

    src = tmp_path / "src"
    assert listed(str(src)) == ["a.parquet", "day=1/b.parquet"]
    assert listed(f"file://{src}/") == ["a.parquet", "day=1/b.parquet"]
    assert listed(f"{src}/*.parquet") == ["a.parquet"]
    assert listed(f"{src}/f.csv") == ["f.csv"], "a file that is named is a file that is wanted"
    assert listed(f"{src}/{{partition_key}}", "day=1") == ["day=1/b.parquet"]
    assert listed(f"{src}/day=*") == ["day=1/b.parquet"]


def test_a_key_with_glob_characters_is_taken_by_the_letter(tmp_path):
    for folder in ("a*", "ab", "[x]"):
        write_source(tmp_path / "src" / folder, {"id": [1]})
    found = vd.parquet(f"{tmp_path}/src/{{partition_key}}/*.parquet")
    for key in ("a*", "[x]"):
        (file,) = list_files(found, key, "here")
        assert Path(file.url).parent.name == key


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "is a Delta table; publish into it with format='delta', or into another folder"),
        (
            {"format": "delta", "columns": ["n"]},
            "'docs/out': column 'n' is int64 here, but string in the Delta table",
        ),
    ],
)
def test_a_target_that_cannot_take_the_rows_is_refused(tmp_path, store, options, words):
    source(tmp_path, {"a.parquet": 3})
    write_deltalake(tmp_path / "out", pa.table({"id": ["a"], "n": ["1"]}))
    planned = plan(publishing(tmp_path, **options), store)
    assert words in str(planned.failed[None])


def test_an_upstream_that_was_never_made_or_of_other_files_is_named(tmp_path, store):
    source(tmp_path, {"a.parquet": 3})
    words = refusal(plan(docs(tmp_path), store, "joined"))
    assert "'joined' reads 'clean', 'doubled', 'scaled'" in words
    assert "never materialized. Select it too: select='+joined' (--select" in words
    settle(plan(docs(tmp_path), store, "clean", "doubled", "scaled"), store)
    source(tmp_path, {"b.parquet": 3})
    settle(plan(docs(tmp_path), store, "clean", "scaled"), store)
    words = refusal(plan(docs(tmp_path), store, "joined"))
    assert "'doubled' was materialized from other source files" in words
    assert "is not selected. Select it too" in words
    assert missing(plan(docs(tmp_path), store, "doubled", "joined")) == {"doubled": 1, "joined": 2}


def test_records_are_read_of_the_version_that_the_rows_were_made_from(tmp_path, store):
    """Of stages that are neither upstream of the stage nor selected with those between."""
    source(tmp_path, {"a.parquet": 3})

    def planned(*stages: str, factor: int = 3, **given: Any) -> RunPlan:
        made = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
        clean = made.project("clean", ["n"])
        first = clean.map_batches(
            "first", Scale, schema={"x": "BIGINT"}, fn_constructor_kwargs={"factor": factor}
        )
        second = first.project("second", ["x"]).project("third", {"z": "x"})
        second.write("out", str(tmp_path / "out"), provenance="first")
        return plan(made, store, *stages, **given)

    settle(planned(), store)
    settle(planned("first", factor=4), store)
    assert missing(planned("out", factor=4)) == {}, "it is as it was"
    for stages in (("out",), ("third", "out"), ("first", "out")):
        words = refusal(planned(*stages, factor=4, force=True))
        assert "'second', which was materialized from another version of 'first'" in words
        assert words.endswith("Select it too")
    settle(planned("second", factor=4), store)
    assert "'third', which was materialized" in refusal(planned("out", factor=4, force=True))
    settle(planned("third", factor=4), store)
    assert missing(planned("out", factor=4)) == {"out": 1}


# Force, resume, what is done


def test_force_computes_again_once(tmp_path, store):
    source(tmp_path, {"a.parquet": 3})
    first = plan(docs(tmp_path), store)
    settle(first, store)
    forced = plan(docs(tmp_path), store, "doubled", "joined", "out", force=True)
    assert missing(forced) == {"doubled": 1, "joined": 1, "out": 1}
    assert not set(keys(forced)["doubled"]) & set(keys(first)["doubled"])
    again = plan(docs(tmp_path), store, "doubled", "joined", "out", force=True)
    assert keys(again) == keys(forced), "a forced run that was killed goes on where it was"
    settle(forced, store)
    assert missing(plan(docs(tmp_path), store)) == {}
    assert all(s.done for s in plan(docs(tmp_path), store).partitions[0].stages.values())


def test_a_forced_run_that_is_attempted_again_computes_what_was_lost_under_new_keys(
    tmp_path, store
):
    source(tmp_path, {"a.parquet": 3, "b.parquet": 3})
    settle(plan(docs(tmp_path), store), store)
    forced = plan(docs(tmp_path), store, force=True)
    settle(forced, store)
    folder = store.parts("docs", "doubled", None)
    lost = keys(forced)["doubled"][0]
    folder.delete([name for name in folder.names() if name.startswith(lost)])
    again = plan(docs(tmp_path), store, force=True, expand=True)
    assert missing(again) == {"doubled": 1, "joined": 1, "out": 1}
    assert lost not in keys(again)["doubled"]
    settle(again, store)
    assert missing(plan(docs(tmp_path), store, expand=True)) == {}


def test_no_two_runs_share_what_they_compute_by_force(tmp_path, store):
    source(tmp_path, {"a.parquet": 3})
    settle(plan(docs(tmp_path), store), store)

    def forced(run: str, *stages: str) -> RunPlan:
        return plan(docs(tmp_path), store, *stages, force=True, run_id=run)

    one, other = forced("one", "doubled"), forced("other", "doubled", "joined", "out")
    settle(other, store)
    assert missing(plan(docs(tmp_path), store)) == {}
    settle(one, store)
    assert missing(plan(docs(tmp_path), store)) == {"joined": 1, "out": 1}, "made of the other's"


@pytest.mark.parametrize("retries", [["r1"], ["r1", "r2", "r3"]])
def test_a_generation_has_its_number_and_the_mark_of_its_run(retries):
    generation = FIRST_GENERATION
    for run in retries:
        generation = raised(generation, run)
        assert raised(generation, run) == generation, "a run that is attempted again"
    assert generation_number(generation) == len(retries)
    assert generation_number(raised(generation, "other", again=False)) == len(retries)
    assert raised(generation, "other", again=False) != generation


def test_a_stage_that_reuses_nothing_is_computed_in_each_run(tmp_path, store):
    source(tmp_path, {"a.parquet": 3, "b.parquet": 3})

    def planned(**given: Any) -> Any:
        return plan(docs(tmp_path, reuse="none"), store, **given)

    for _ in range(2):
        settle(planned(run_id="run"), store)
        assert missing(planned(run_id="run")) == {}, "a second attempt of the run that committed"
        again = planned(run_id="next")
        assert missing(again) == {"doubled": 2, "joined": 2, "out": 2}, "not the other branch"
        settle(again, store)
    assert missing(plan(docs(tmp_path), store)) == {}, "a stage that reuses results again"
    assert missing(plan(docs(tmp_path, reuse="none"), store, "joined", "out")) == {}


def test_parts_without_a_manifest_are_kept(tmp_path, store):
    """As a killed run leaves them."""
    source(tmp_path, {"a.parquet": 3, "b.parquet": 3})
    first = plan(docs(tmp_path), store)
    settle(first, store)
    for manifest in (tmp_path / "store/docs/clean/manifests").rglob("*.json"):
        manifest.unlink()
    (tmp_path / "store/docs/clean/parts/~unpartitioned" / "stray.parquet").write_bytes(b"?")
    resumed = plan(docs(tmp_path), store)
    assert missing(resumed) == {}
    stages = resumed.partitions[0].stages
    assert stages["clean"].done is None
    assert len(stages["clean"].parts) == 2
    assert stages["out"].done is not None


def test_a_manifest_that_is_broken_is_named(tmp_path, store):
    source(tmp_path, {"a.parquet": 3})
    settle(plan(docs(tmp_path), store, "clean"), store)
    (manifest,) = (tmp_path / "store/docs/clean/manifests").rglob("*.json")
    manifest.write_bytes(manifest.read_bytes()[:100])
    (error,) = plan(docs(tmp_path), store, "doubled").failed.values()
    assert isinstance(error, vd.errors.StoreError)
    assert str(manifest) in str(error)
    assert "Delete it" in str(error)


def test_an_error_of_one_partition_names_it_and_leaves_the_others(tmp_path, store, monkeypatch):
    required = ParquetSource.required

    def gone(self: Any, files: Any, partition: str | None, location: str) -> Any:
        if partition == "a":
            raise OSError("no such host")
        return required(self, files, partition, location)

    monkeypatch.setattr(ParquetSource, "required", gone)
    planned = plan_run(in_partitions(tmp_path), ["clean"], ["a", "b"], store)
    assert [each.key for each in planned.partitions] == ["b"]
    assert "partition 'a': OSError: no such host" in refusal(planned)


def in_partitions(tmp_path: Path) -> vd.Pipeline:
    for key in "ab":
        write_source(tmp_path / "src" / key, {"id": [1]})
    some = partitioned(f"{tmp_path}/src", ["a", "b"], "some")
    some.project("clean", ["id"])
    return some


def test_a_printed_plan_counts_the_partitions_that_are_not_up_to_date(tmp_path, store):
    some = in_partitions(tmp_path)

    def shown(*keys: str) -> str:
        planned = plan_run(some, ["clean"], keys, store)
        settle(planned, store)
        return str(planned).splitlines()[1]

    assert shown("a", "b") == (
        "  clean: 0 of 2 partitions up to date, 2 out of date (not computed before); fragments: "
        "2 to compute, 0 in the store"
    )
    assert shown("a", "b") == "  clean: 2 of 2 partitions up to date"
    (tmp_path / "src" / "a" / "data.parquet").write_bytes(b"damaged")
    (line,) = str(plan_run(some, ["clean"], ["a"], store)).splitlines()
    assert "some: 1 partition (1 cannot be planned)" in line


def test_code_that_is_edited_while_a_run_begins_is_noticed_and_its_own_files_are_not(
    tmp_path, store, monkeypatch
):
    """No row may be kept under the key of other code, and a run may write to its targets."""
    write_source(tmp_path / "src", {"id": [1]})
    (tmp_path / "user_code.py").write_text("def same(batch, folder):\n    return batch\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    user_code = importlib.import_module("user_code")
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    docs.map_batches(
        "same", user_code.same, schema={"n": "BIGINT"}, fn_kwargs={"folder": str(tmp_path / "out")}
    )
    plan = plan_run(docs, ["same"], [None], store)
    spec = docs["same"].spec
    workers = plan.pool(spec)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "log.txt").write_text("made by the run")
    assert plan.pool(spec) == workers != pool_identity(docs, spec)
    assert edited(plan, ["same"]) == []
    (tmp_path / "user_code.py").write_text("def same(batch, folder):\n    return batch[:1]\n")
    (found,) = edited(plan, ["same"])
    assert "its code was edited while the run started" in found
    sys.modules.pop("user_code")


def reads(weights: Any, scale: int = 1) -> Any:
    return lambda ids: ids


class Opaque:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, batch: Any) -> Any:
        return batch


def test_the_arguments_of_equal_versions_have_workers_of_their_own(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.pt").write_text(folder)

    def identities(weights: Any, scale: int) -> tuple[str, str]:
        docs = vd.Pipeline("docs", source=vd.parquet("/data"), id="id")
        factory = functools.partial(reads, weights, scale=scale)
        given: Any = {"columns": ["id"], "return_type": "bigint", "reuse": vd.Reuse(version="1")}
        spec = docs.predict_batch("n", factory, **given).spec
        return stage_definition(docs, spec), pool_identity(docs, spec)

    files = [vd.local_file(tmp_path / folder / "model.pt") for folder in ("a", "b")]
    (key, pool), (other, other_pool) = (identities(file, 1) for file in files)
    assert key == other, "their contents do not count with a version"
    assert pool != other_pool
    assert len({identities(files[0], scale)[0] for scale in (1, 2)}) == 2
    assert identities(files[0], 1) == (key, pool)
    opaque = [identities(Opaque(number), 1) for number in (1, 2)]
    assert opaque[0][0] == opaque[1][0], "objects count by their type"
    assert opaque[0][1] != opaque[1][1]


def test_the_workers_of_a_script_are_those_of_its_module(monkeypatch):
    def pool() -> str:
        docs = vd.Pipeline("docs", source=vd.table([{"id": 1}]), id="id")
        docs.map_batches("m", Opaque, schema={"n": "BIGINT"}, fn_constructor_args=(1,))
        return pool_identity(docs, docs["m"].spec)

    as_module = pool()
    monkeypatch.setattr(Opaque, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[__name__])
    assert pool()[:8] == as_module[:8]
