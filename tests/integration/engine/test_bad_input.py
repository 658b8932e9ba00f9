"""Bad input: one error names its location, and committed data is unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage, write_source
from support.results import failure, metadata
from vane_dagster.planning.planner import plan_run
from vane_dagster.sources.parquet import ParquetSource
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store


class Model:
    """Leaves a file behind when it is constructed, and scales a number."""

    def __init__(self, trace: str) -> None:
        Path(trace).touch()

    def __call__(self, batch):
        return {"scaled": pa.array([2 * n for n in batch["n"].to_pylist()], pa.int64())}


class Faulty(Model):
    """Returns a batch without one of its columns."""

    def __call__(self, batch):
        return {"id": batch["id"]}


GOOD = {"id": [1, 2, 3], "n": [10, 20, 30], "text": ["a", "b", "c"]}


def make(
    tmp_path: Path,
    where: str | None = None,
    columns: Any = None,
    model: Any = Model,
    id: str = "id",
    source: ParquetSource | None = None,
    project: Any = ("n", "text"),
    partitions: list[str] | None = None,
    **mapped: Any,
) -> vd.Pipeline:
    """source -> clean -> scaled, with a model that leaves a trace."""
    key = "/{partition_key}" if partitions else ""
    docs = vd.Pipeline(
        "docs",
        source=source or vd.parquet(f"{tmp_path}/src{key}"),
        id=id,
        partitions_def=dg.StaticPartitionsDefinition(partitions) if partitions else None,
    )
    clean = docs.project("clean", project, where=where)
    clean.map_batches(
        "scaled",
        model,
        schema={"scaled": "BIGINT"},
        columns=columns,
        fn_constructor_kwargs={"trace": str(tmp_path / "constructed")},
        **grouped(mapped),
    )
    return docs


def manifests(tmp_path: Path) -> dict[str, bytes]:
    found = (tmp_path / "store").rglob("manifests/*/*.json")
    return {str(path): path.read_bytes() for path in found}


@pytest.fixture
def refused(tmp_path, local, materialize) -> Callable[..., str]:
    """Runs a pipeline that must fail once, and gives the error; what was committed stays."""

    def run(
        docs: vd.Pipeline,
        *words: str,
        constructed: bool | None = False,
        unchanged: Sequence[str] = (),
        **given: Any,
    ) -> str:
        before = manifests(tmp_path)
        trace = tmp_path / "constructed"
        trace.unlink(missing_ok=True)
        result = materialize(docs, local, raises=False, **given)
        text = failure(result)
        for word in words:
            assert word in text
            assert text.count(word) == 1, f"{word!r} is named more than once:\n{text}"
        assert constructed in (None, trace.exists())
        assert manifests(tmp_path) == before
        made = [event.asset_key.path[-1] for event in result.get_asset_materialization_events()]
        assert made == list(unchanged)
        return text

    return run


@pytest.fixture
def committed(tmp_path, local, materialize) -> None:
    """A good run before the bad one."""
    write_source(tmp_path / "src", GOOD)
    materialize(make(tmp_path), local)
    assert len(manifests(tmp_path)) == 2


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as opened:
        yield opened


# Plans


def refuse(tmp_path: Path, docs: vd.Pipeline, *words: str) -> str:
    """Plan a pipeline, which must fail; return the error."""
    planned = plan_run(docs, list(docs.stages), [None], Store(Location(f"{tmp_path}/store")))
    text = str(planned.failed[None])
    for word in words:
        assert text.count(word) == 1, f"{word!r} in\n{text}"
    return text


BAD_SOURCES: dict[str, tuple[dict[str, bytes], tuple[str, ...]]] = {
    "missing": ({}, ("no Parquet file at", "/src'", "Check the path")),
    "other files": (
        {"a.csv": b"id\n1\n", "_SUCCESS": b""},
        ("no Parquet file at", "a folder that holds *.parquet", "another format"),
    ),
    "not Parquet": (
        {"b.parquet": b"PAR1 and nothing else"},
        ("b.parquet' (21 bytes)", "cannot be read as Parquet", "write it again"),
    ),
    "another format": (
        {"b.parquet": b"id,n,text\n1,2,secret\n"},
        ("b.parquet' (21 bytes)", "cannot be read as Parquet", "COPY"),
    ),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_files_that_are_no_source(name, tmp_path):
    files, words = BAD_SOURCES[name]
    for file, data in files.items():
        (tmp_path / "src").mkdir(exist_ok=True)
        (tmp_path / "src" / file).write_bytes(data)
    assert "secret" not in refuse(tmp_path, make(tmp_path), *words)


@pytest.mark.parametrize("pattern", ["{}", "{}/*.parquet", "{}/a.parquet"])
def test_a_folder_whose_name_is_a_pattern(pattern, tmp_path):
    write_source(tmp_path / "a [z]", GOOD)
    url = f"{tmp_path}/{pattern}"
    docs = make(tmp_path, source=vd.parquet(url.format("a [z]")))
    refuse(tmp_path, docs, "no Parquet file", "make a URL a pattern: in a name, write")

    escaped = vd.parquet(url.format("a [[]z]"))
    assert len(escaped.list_files([None], "here")[None]) == 1


@pytest.mark.parametrize(
    ("rows", "given", "words"),
    [
        ({"id": []}, {}, ["the files of its source hold no rows", "allow_empty=True"]),
        (
            {"id": [1], "n": [1], "N": [2]},
            {"project": ["id"], "columns": ["id"]},
            ["'n' and 'N'", "ignores case"],
        ),
        (
            {},
            {"project": ["n", "txt"]},
            ["stage 'docs/clean': column 'txt' =", "does not fit", "has 'id', 'n', 'text'"],
        ),
        ({}, {"where": "lenght > 1"}, ["stage 'docs/clean': where = 'lenght > 1'"]),
        ({}, {"project": {"n": "n", "t": "trim(n)"}}, ["column 't' = 'trim(n)' does not fit its"]),
        (
            {},
            {"columns": ["n", "txt"]},
            ["stage 'docs/scaled': 'clean' has no column 'txt'; it has", "Did you mean 'text'?"],
        ),
        ({}, {"id": "key"}, ["source of pipeline 'docs' has no column 'key'; it has 'id', 'n'"]),
        ({"id": [1.0, 2.0, 3.0]}, {}, ["the id 'id' is double", "whole numbers or text"]),
        ({"id": [True, False, None]}, {}, ["the id 'id' is bool", "whole numbers or text"]),
        ({"id": [[1], [2], [3]]}, {}, ["the id 'id' is list<item", "whole numbers or text"]),
    ],
)
def test_columns_that_do_not_fit(rows, given, words, tmp_path):
    found = {**GOOD, **rows}
    size = len(found["id"])
    write_source(tmp_path / "src", {name: column[:size] for name, column in found.items()})
    refuse(tmp_path, make(tmp_path, **given), *words)


def test_an_id_declared_as_another_type(tmp_path):
    write_source(tmp_path / "src", GOOD)
    docs = make(tmp_path)
    docs["clean"].map_batches("sized", echo, schema={"id": "VARCHAR", "n": "BIGINT"})
    words = ("'docs/sized': schema declares the id 'id' as string", "comes in as int64")
    refuse(tmp_path, docs, *words)


def echo(batch):
    return batch


# Runs


def test_a_source_without_rows_may_be_allowed(tmp_path, local, materialize):
    write_source(tmp_path / "src", pa.table(GOOD).slice(0, 0))
    allowed = vd.parquet(str(tmp_path / "src"), allow_empty=True)
    result = materialize(make(tmp_path, source=allowed), local)
    assert metadata(result, "scaled")["dagster/row_count"] == 0
    assert not (tmp_path / "constructed").exists()
    assert read_stage(tmp_path / "store", "docs", "scaled").schema.names == ["id", "scaled"]


def test_columns_of_types_that_are_not_needed_are_not_looked_at(tmp_path, local, materialize):
    """DuckDB knows neither in memory; a column that no stage needs must not fail the run."""
    half = pa.array([1.5, 2.5, 3.5], pa.float16())
    large = pa.array([1, 2, 3], pa.decimal256(50, 2))
    write_source(tmp_path / "src", pa.table({**GOOD, "half": half, "large": large}))
    result = materialize(make(tmp_path), local)
    assert metadata(result, "scaled")["dagster/row_count"] == 3


@pytest.mark.usefixtures("committed")
def test_a_column_that_does_not_come_back(tmp_path, refused):
    write_source(tmp_path / "src", {"id": [4], "n": [40], "text": ["d"]}, "b.parquet")
    before = {path for path in manifests(tmp_path) if "/scaled/" in path}
    docs = make(tmp_path, model=Faulty)
    refused(
        docs, "stage 'docs/scaled', fragment 0", "'scaled' is declared in the schema",
        "returned: 'id'", constructed=True, select=["scaled"],
    )  # fmt: skip
    assert {path for path in manifests(tmp_path) if "/scaled/" in path} == before


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([4, 5, 4, 5, 6], "the source has 2 ids more than once: 4, 5 in 'id'"),
        ([4, None, 5, 6, 7], "the source has 1 null ids in 'id'"),
    ],
)
def test_ids_twice_or_null_inside_a_fragment(ids, words, tmp_path, refused):
    rows = {"id": ids, "n": range(5), "text": ["x"] * 5}
    write_source(tmp_path / "src", rows, "b.parquet")
    text = refused(make(tmp_path), "stage 'docs/clean', fragment 1", words, constructed=None)
    assert "b.parquet" in text


def test_rows_that_are_filtered_out_may_lack_an_id(tmp_path, local, materialize):
    rows = {"id": [1, None, 2, 2], "n": [1, 2, 3, 4], "text": ["x"] * 4}
    write_source(tmp_path / "src", rows)
    result = materialize(make(tmp_path, where="id IS NOT NULL AND n < 4"), local)
    assert metadata(result, "scaled")["dagster/row_count"] == 2


@pytest.mark.usefixtures("committed")
def test_an_id_in_two_files(tmp_path, refused):
    write_source(tmp_path / "src", {**GOOD, "id": [9, 8, 3]}, "b.parquet")
    text = refused(
        make(tmp_path),
        "stage 'docs/clean': ids 3 of 'id' are in more than one fragment",
        "must be unique inside a partition",
        constructed=True,
    )
    assert "a.parquet'" in text
    assert "b.parquet'" in text


BAD_FILES: dict[str, dict[str, Any]] = {
    "corrupt": {},
    "typed": {**GOOD, "id": [1.5, 2.5, 3.5]},
    "without_n": {"id": [1], "text": ["a"]},
    "duplicate": {**GOOD, "id": [1, 1, 2]},  # the last one, as it is found only when it is read
}


def test_bad_partitions_leave_the_others(tmp_path, local, instance):
    keys = ["a", *BAD_FILES, "z"]
    for key in keys:
        write_source(tmp_path / "src" / key, BAD_FILES.get(key) or GOOD)
    (tmp_path / "src/corrupt/a.parquet").write_bytes(b"nothing")
    docs = make(tmp_path, partitions=keys)
    resources = {"compute": local, "store": vd.FragmentStore(root=str(tmp_path / "store"))}
    result = dg.materialize(
        [docs.build_assets()],
        instance=instance,
        resources=resources,
        tags={
            "dagster/asset_partition_range_start": "a",
            "dagster/asset_partition_range_end": "z",
        },
        raise_on_error=False,
    )
    text = failure(result)
    named = ", ".join(f"'{key}'" for key in BAD_FILES)
    assert f"4 of 6 partitions failed ({named}); the others are materialized" in text
    for stage in docs:
        assert instance.get_materialized_partitions(stage.key) == {"a", "z"}
    for key in "az":
        scaled = read_stage(tmp_path / "store", "docs", "scaled", key)
        assert scaled["scaled"].to_pylist() == [20, 40, 60]
    for key in BAD_FILES:
        assert not [path for path in manifests(tmp_path) if f"/manifests/{key}/" in path]

    write_source(tmp_path / "src/corrupt", GOOD)
    fixed = dg.materialize([docs.build_assets()], resources=resources, partition_key="corrupt")
    assert metadata(fixed, "scaled")["dagster/partition_row_count"] == 3
