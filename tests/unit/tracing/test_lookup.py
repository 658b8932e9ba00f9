"""Rows of neighboring stages that belong together, and rows in the files of the source."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vane_dagster.storage.manifest import FileSpan, FragmentRecord, PartInfo
from vane_dagster.tracing.manifest_index import aligned
from vane_dagster.tracing.missing import search_source


@pytest.mark.parametrize(
    ("rows", "depths", "found"),
    [
        ([("w1", 1), ("w2", 2)], (2, 2), (0, {"w1": ("w1", 1), "w2": ("w2", 2)})),
        ([("w1", 1), ("w2", 1), ("w3", 2)], (2, 1), (0, {1: (1,), 2: (2,)})),
        ([(1,), (2,)], (1, 2), (1, {1: None, 2: None})),
        ([("w1", 1)], (2, 3), (1, {"w1": None})),
    ],
    ids=["one depth", "many to one", "one to many", "many to more"],
)
def test_rows_of_neighboring_stages_correspond_by_their_keys(rows, depths, found):
    assert aligned(rows, *depths) == found


def fragments(*bounds: tuple[str, int, int]) -> list[FragmentRecord]:
    return [FragmentRecord(url, start, stop, f"{url}{start}", 1) for url, start, stop in bounds]


def manifest(records: list[FragmentRecord], *parts: PartInfo, **given: Any) -> Any:
    return SimpleNamespace(fragments=records, parts=parts, **given)


def test_the_fragments_of_a_file_are_searched_together():
    records = fragments(*(("a", 10 * i, 10 * i + 10) for i in range(5)), ("b", 0, 5))
    held = manifest(records, *[PartInfo("k", "d", 0, 1)] * 6, keys=("id",))
    searched: list[FileSpan] = []
    hits = [(FileSpan("a", 0, 50), 23), (FileSpan("b", 0, 5), 3), None]

    def find(manifest: Any, spans: list[FileSpan], id: Any) -> Any:
        searched[:] = spans
        return hits.pop(0)

    index: Any = SimpleNamespace(find_in_source=find)
    assert search_source(index, held, 1) == (2, FileSpan("a", 0, 50), 23)
    assert searched == [FileSpan("a", 0, 50), FileSpan("b", 0, 5)]
    assert search_source(index, held, 1) == (5, FileSpan("b", 0, 5), 3)
    assert search_source(index, held, 1) is None
