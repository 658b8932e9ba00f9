"""Plans of some rows: the first ones of a stage, and samples over all partitions."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from support.plans import docs, plan, source
from vane_dagster.pipeline.pipeline import Stage
from vane_dagster.planning.plan import Part, RunPlan
from vane_dagster.planning.preview_plan import first_rows, previews
from vane_dagster.planning.sample_plan import choose, partition_seed, spread
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import FileSpan, FragmentRecord, PartInfo

STAGES = ("clean", "doubled", "scaled", "joined")


def rows_read(each: RunPlan) -> list[tuple[str, int, int]]:
    found = each.partitions[0].fragments
    return [(f.url.rpartition("/")[2], f.start, f.stop) for f in found]


def test_upstream_stages_that_are_not_stored_are_computed_for_the_first_rows(tmp_path, store):
    source(tmp_path, {"a.parquet": 100})
    planned = plan(docs(tmp_path), store, "clean", "doubled")
    first, second, _ = previews(planned, "doubled", 16)
    assert first.is_sample
    assert first.needed() == ("clean", "doubled")
    assert rows_read(first) == [("a.parquet", 0, 16)]
    assert rows_read(second) == [("a.parquet", 0, 64)]
    keys = [s.keys for p in (first, planned) for s in p.partitions[0].stages.values()]
    assert len(set(keys)) == 4  # what is computed is not part of any other plan


def test_only_what_the_stage_needs_is_computed(tmp_path, store):
    source(tmp_path, {"a.parquet": 10})
    planned = plan(docs(tmp_path), store, *STAGES)
    for stage, needed in (("clean", ("clean",)), ("scaled", ("clean", "scaled"))):
        assert [each.needed() for each in previews(planned, stage, 16)] == [needed]
    (joined,) = previews(planned, "joined", 16)
    assert joined.needed() == STAGES


def stored(planned: RunPlan, stage: str, rows: list[int]) -> RunPlan:
    (partition,) = planned.partitions
    parts = {
        i: Part(StoragePath("somewhere"), PartInfo(str(i) * 40, "", count, 10))
        for i, count in enumerate(rows)
    }
    stages = {**partition.stages, stage: replace(partition.stages[stage], parts=parts)}
    return replace(planned, partitions=[replace(partition, stages=stages)])


def test_stored_parts_are_read_and_empty_ones_are_skipped(tmp_path, store):
    source(tmp_path, {"a.parquet": 100})
    planned = plan(docs(tmp_path, fragment_rows=25), store, "clean", "doubled")
    planned = stored(planned, "clean", [0, 20, 10, 0])
    found = list(previews(planned, "doubled", 16))
    assert [each.needed() for each in found] == [("doubled",)] * 2
    parts = [each.partitions[0].stages["clean"].parts for each in found]
    read = [[(part.info.key[0], part.info.rows) for part in each.values()] for each in parts]
    assert read == [[("1", 16)], [("1", 20), ("2", 10)]]


def test_rows_that_a_join_matches_are_read_from_whole_parts(tmp_path, store):
    source(tmp_path, {"a.parquet": 100})
    planned = plan(docs(tmp_path), store, *STAGES)
    for stage in ("clean", "doubled", "scaled"):
        planned = stored(planned, stage, [100])
    found = next(previews(planned, "joined", 16))
    stages = found.partitions[0].stages
    rows = {name: each.parts[0].info.rows for name, each in stages.items() if each.parts}
    assert rows == {"clean": 16, "doubled": 100, "scaled": 100}


def test_plans_read_more_and_more_rows_up_to_a_limit(tmp_path, store):
    source(tmp_path, {"a.parquet": 500})
    planned = plan(docs(tmp_path, fragment_rows=100), store, "clean")

    def read(rows: int) -> list[int]:
        return [sum(each.partitions[0].preview) for each in previews(planned, "clean", rows)]

    assert read(16) == [16, 64, 256, 500]
    assert read(500) == [500]
    assert read(1) == [1, 4, 16, 64, 256, 500]


def test_first_rows_of_one_file_and_of_several():
    whole = FragmentRecord("a", 10, 110, "x", 1000)
    assert first_rows(whole, 100) == first_rows(whole, 200) == whole
    assert first_rows(whole, 16) == FragmentRecord("a", 10, 26, "x", 160)
    files = (FileSpan("a", 0, 5), FileSpan("b", 0, 5), FileSpan("c", 0, 5))
    found = first_rows(FragmentRecord("a", 0, 15, "x", 150, files), 7)
    assert (found.start, found.stop, found.bytes) == (0, 7, 70)
    assert list(found.files) == [FileSpan("a", 0, 5), FileSpan("b", 0, 2)]


ROWS = inspect.signature(Stage.adopt).parameters["rows"].default
PARTITIONS = {f"2026-01-{day:02}": dict.fromkeys(range(5), 40) for day in range(1, 32)}
UNEVEN = {
    **{f"small{n}": {0: 3} for n in range(500)},
    "large": {n: 90 + n for n in range(40)},
    "empty": {0: 0},
}
Row = tuple[str, int, int]
"""A partition, a fragment and a position in it."""


def rows_of(partitions: Mapping[str, Mapping[int, int]]) -> list[Row]:
    return [
        (key, index, place)
        for key, fragments in partitions.items()
        for index, count in fragments.items()
        for place in range(count)
    ]


def sample(partitions: Mapping[str, Mapping[int, int]], seed: int, rows: int = ROWS) -> set[Row]:
    """The rows that `adopt` computes again."""
    counts = spread({k: sum(each.values()) for k, each in partitions.items()}, rows, seed)
    return {
        (key, index, place)
        for key, share in counts.items()
        if share
        for index, places in choose(
            partitions[key], share, partition_seed(seed, key), max(counts.values())
        ).items()
        for place in places
    }


@functools.cache
def samples(is_even: bool) -> list[set[Row]]:
    return [sample(PARTITIONS if is_even else UNEVEN, seed) for seed in range(25)]


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize(
    "order",
    [
        lambda row: zlib.crc32(str(row).encode()),
        lambda row: row,
        lambda row: (row[2], row[0], row[1]),
        lambda row: (row[1], row[2], row[0]),
        lambda row: (-row[2], row[1], row[0]),
    ],
    ids=["anywhere", "few_partitions", "first_of_each_fragment", "first_fragment", "last"],
)
def test_a_change_of_five_percent_is_found(is_even: bool, order: Callable[[Row], object]) -> None:
    """In each trial, wherever the rows are that it changes."""
    every = sorted(rows_of(PARTITIONS if is_even else UNEVEN), key=order)  # type: ignore[arg-type]  # what it returns can be compared
    changed = set(every[: len(every) // 20])
    assert not any(chosen.isdisjoint(changed) for chosen in samples(is_even))


def test_so_many_distinct_rows_are_chosen() -> None:
    assert len(sample(PARTITIONS, 1)) == ROWS
    assert len(sample(UNEVEN, 1)) == ROWS
    few = {"a": {0: 3, 1: 0}, "b": {0: 2}}
    assert sample(few, 1, 9) == set(rows_of(few))
    assert sum(spread({"a": 3, "b": 2}, None, 1).values()) == 5
