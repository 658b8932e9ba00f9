"""Bad input: one error names its location, and committed data is unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.in_process import InProcessCompute
from vane_dagster.planning.planner import plan_run
from vane_dagster.sources.parquet import ParquetSource
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store


def doubled(batch):
    return {"scaled": pa.array([2 * n for n in batch["n"].to_pylist()], pa.int64())}


GOOD = {"id": [1, 2, 3], "n": [10, 20, 30], "text": ["a", "b", "c"]}


def make(
    tmp_path: Path,
    where: str | None = None,
    columns: Any = None,
    id: Any = "id",
    source: ParquetSource | None = None,
    project: Any = ("n", "text"),
    partitions: list[str] | None = None,
) -> vd.Pipeline:
    """source -> clean -> scaled."""
    key = "/{partition_key}" if partitions else ""
    docs = vd.Pipeline(
        "docs",
        source=source or vd.parquet(f"{tmp_path}/src{key}", allow_empty=bool(partitions)),
        id=id,
        partitions_def=dg.StaticPartitionsDefinition(partitions) if partitions else None,
    )
    clean = docs.project("clean", project, where=where)
    clean.map_batches("scaled", doubled, schema={"scaled": "BIGINT"}, columns=columns)
    return docs


# Plans


def refuse(tmp_path: Path, docs: vd.Pipeline, *words: str) -> str:
    planned = plan_run(docs, list(docs.stages), [None], Store(StoragePath(f"{tmp_path}/store")))
    text = str(planned.failed[None])
    for word in words:
        assert text.count(word) == 1, f"{word!r} in\n{text}"
    return text


BAD_SOURCES: dict[str, tuple[dict[str, bytes], tuple[str, ...]]] = {
    "missing": ({}, ("no Parquet file at", "/src'", "Check the path")),
    "other files": (
        {"a.csv": b"id\n1\n", "_SUCCESS": b""},
        ("no Parquet file at", "a folder that holds some", "another format"),
    ),
    "not Parquet": (
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
        ({}, {"project": {"n": "n", "t": "trim(n)"}}, ["column 't' = 'trim(n)' does not fit its"]),
        ({}, {"id": "key"}, ["source of pipeline 'docs' has no column 'key'; it has 'id', 'n'"]),
        ({"id": [1.0, 2.0, 3.0]}, {}, ["the id 'id' has the type double", "numbers or text"]),
        ({"id": [None]}, {}, ["the id 'id' has the type null"]),
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
    docs["clean"].map_batches("sized", doubled, schema={"id": "VARCHAR", "n": "BIGINT"})
    words = (
        "'docs/sized': schema declares the id 'id' as string",
        "its type in the input is int64",
    )
    refuse(tmp_path, docs, *words)


def test_columns_that_clash_or_are_not_there_are_refused_where_they_are_declared(tmp_path):
    with pytest.raises(vd.errors.SchemaError) as raised:
        make(tmp_path, columns=["n", "txt"])
    assert "stage 'docs/scaled': 'clean' has no column 'txt'; it has" in str(raised.value)
    assert "Did you mean 'text'?" in str(raised.value)
    docs = make(tmp_path)
    other = docs.project("other", {"n": "n + 1", "m": "n"})
    with pytest.raises(vd.errors.SchemaError) as raised:
        docs.join("both", docs["clean"], other)
    assert "column 'n' comes from both 'clean' and 'other'" in str(raised.value)
    named = {"other": {"other_n": "n", "m": "m"}}
    assert f"columns={named}" in str(raised.value)
    docs.join("named", docs["clean"], other, columns=named)
    with pytest.raises(vd.errors.SchemaError, match="'scaled' has no column 'z'; it has"):
        docs.join("both", docs["clean"], docs["scaled"], columns={"scaled": ["z"]})
    with pytest.raises(vd.errors.DefinitionError, match="columns names 'none'"):
        docs.join("again", docs["clean"], docs["scaled"], columns={"none": ["z"]})


# A run


HALVES = pa.array([1.5, 2.5, 3.5, None], pa.float16())
LARGE = pa.array([1, 2, 3, None], pa.decimal256(50, 2))
GOOD_FILES: dict[str, Any] = {
    "a": GOOD,
    "filtered": {"id": [1, 2, 3, None], "n": [10, 20, 30, 0], "text": ["x"] * 4,
                 "half": HALVES, "large": LARGE},
    "none": pa.table(GOOD).slice(0, 0),
}  # fmt: skip
"""Rows that are filtered out may lack an id, and no stage needs the types that DuckDB lacks."""
FOUR = {"id": [1, 2, 3, 4], "n": [10, 20, 30, 40], "text": ["x"] * 4}
BAD_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "corrupt": (GOOD, "a.parquet' (7 bytes) cannot be read as Parquet"),
    "without_n": ({"id": [1], "text": ["a"]}, 'Referenced column "n" not found'),
    "twice": ({**GOOD, "id": [1, 1, 2]}, "the source has 1 id more than once: 1 in 'id'"),
    "null": ({**GOOD, "id": [1, None, 2]}, "the source has 1 null id in 'id'"),
    "apart": (FOUR, "ids such as 1, 2, 3 of 'id' are in more than one fragment"),
}


def test_ids_of_several_columns_are_refused_with_the_columns(tmp_path):
    write_source(tmp_path / "src", {"doc": ["a", "a"], "page": [1, 1], "n": [1, 2]})
    docs = make(tmp_path, id=["doc", "page"], project=["n"])
    words = (
        "the source has 1 id more than once: 'a|1' in 'id', which is made from 'doc', 'page'; an"
    )
    with pytest.raises(vd.errors.VaneError) as raised:
        docs.run(store=str(tmp_path / "store"), compute=InProcessCompute())
    assert words in str(raised.value)


def test_bad_partitions_leave_the_others(tmp_path):
    keys = [*GOOD_FILES, *BAD_FILES]
    for key, rows in GOOD_FILES.items():
        write_source(tmp_path / "src" / key, rows)
    for key, (rows, _) in BAD_FILES.items():
        write_source(tmp_path / "src" / key, rows)
    (tmp_path / "src/corrupt/a.parquet").write_bytes(b"nothing")
    write_source(tmp_path / "src/apart", FOUR, "b.parquet")
    docs = make(tmp_path, where="n > 0", partitions=keys)
    given = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}
    with pytest.raises(vd.errors.VaneError) as raised:
        docs.run(**given)
    text = str(raised.value)
    for _, words in BAD_FILES.values():
        assert text.count(words) == 1, words
    for key, rows in (("a", [20, 40, 60]), ("filtered", [20, 40, 60]), ("none", [])):
        scaled = read_stage(tmp_path / "store", "docs", "scaled", key)
        assert scaled.schema.names == ["id", "scaled"]
        assert scaled["scaled"].to_pylist() == rows
    committed = (tmp_path / "store").rglob("manifests/*/*.json")
    assert not {path.parent.name for path in committed} & {*BAD_FILES}

    write_source(tmp_path / "src/corrupt", GOOD)
    docs.run("corrupt", **given)
    assert read_stage(tmp_path / "store", "docs", "scaled", "corrupt").num_rows == 3
