"""Rows of neighboring stages that belong together, ids as given, and what a stage left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from vane_dagster.errors import TraceError
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import FileSpan, FragmentRecord, PartInfo
from vane_dagster.storage.quarantine import fault_schema, write_faults
from vane_dagster.tracing.manifest_index import aligned, as_id, fragment_index
from vane_dagster.tracing.missing import leaving, search_source


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


@pytest.mark.parametrize(("given", "id"), [("7", 7), (7, 7), ("-1", -1)])
def test_an_id_is_converted_to_the_type_of_its_column(given, id):
    assert as_id(given, pa.int8(), "docs/a", "id") == id
    assert as_id(given, pa.string(), "docs/a", "id") == str(given)


@pytest.mark.parametrize("given", ["seven", 7.0, True, 128, None])
def test_an_id_out_of_its_column_is_refused(given):
    with pytest.raises(TraceError, match=r"'docs/a': id is .*; its column 'id' is int8"):
        as_id(given, pa.int8(), "docs/a", "id")


def fragments(*bounds: tuple[str, int, int]) -> list[FragmentRecord]:
    return [FragmentRecord(url, start, stop, f"{url}{start}", 1) for url, start, stop in bounds]


def manifest(records: list[FragmentRecord], *parts: PartInfo, **given: Any) -> Any:
    return SimpleNamespace(fragments=records, parts=parts, **given)


def test_a_fragment_is_found_by_its_identity_wherever_it_stands():
    first, second, third = fragments(("a", 0, 5), ("a", 5, 9), ("b", 0, 5))
    held = manifest([first, second])
    assert fragment_index(held, second, 1) == 1
    assert fragment_index(held, second, 0) == 1
    assert fragment_index(held, first, 7) == 0
    assert fragment_index(held, third, 0) is None


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


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({}, "left out by 'docs/a'"),
        ({"filtered": 1}, "filtered by 'docs/a'"),
        ({"filtered": 1, "quarantined": 1}, "filtered or quarantined by 'docs/a'"),
    ],
)
def test_without_records_the_counts_say_what_became_of_a_row(counts, text):
    held = manifest([], PartInfo("k", "d", 1, 1, **counts), stage="a")
    index: Any = SimpleNamespace(label=lambda stage: f"docs/{stage}")
    assert leaving(index, held, 0, [1]) == text


def test_the_record_of_a_failed_row_says_why_it_failed(tmp_path):
    folder = Location(str(tmp_path))
    row = {"id": 3, "error": "ValueError", "message": "three\nis too much"}
    schema = fault_schema(pa.int64())
    faults = pa.Table.from_pylist([{**dict.fromkeys(schema.names), **row}], schema)
    part = PartInfo(
        "k", "d", 1, 1, filtered=1, quarantined=1, faults=write_faults(folder, "k", faults)
    )
    held = manifest([], part, pipeline="docs", stage="a", partition=None)
    store = SimpleNamespace(parts=lambda *place: folder)
    origins = [None, "copied: computed by run first"]
    index: Any = SimpleNamespace(
        label=lambda stage: f"docs/{stage}", store=store, origin=lambda *row: origins.pop(0)
    )
    reason = "quarantined by 'docs/a': ValueError: three is too much"
    assert leaving(index, held, 0, [3]) == reason
    assert leaving(index, held, 0, [3]) == f"{reason} (copied: computed by run first)"
    assert leaving(index, held, 0, [4]) == "filtered by 'docs/a'"
