"""Hugging Face datasets as sources: where rows are read, what identifies them, and errors."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

os.environ["HF_HUB_OFFLINE"] = "1"  # the library reads it when it is imported
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

import vane_dagster as vd  # noqa: E402 - after the variable
from support.ingested import listed, read, split  # noqa: E402 - after the variable
from vane_dagster.sources import FragmentRule, ReadContext, SourceTable  # noqa: E402 - after the variable
from vane_dagster.storage.filesystem import Location  # noqa: E402 - after the variable
from vane_dagster.storage.store import Store  # noqa: E402 - after the variable
from vane_dagster.storage.stored_tables import ArrowRows, places_of, tables  # noqa: E402 - after the variable

# The library gives pyarrow an argument that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")
COUNT = 3_000
RULE = FragmentRule(500)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Location(str(tmp_path / "store")))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A dataset that was saved to disk in two shards."""
    columns = {"id": range(COUNT), "text": [f"text {n}" for n in range(COUNT)]}
    made = datasets.Dataset.from_dict({**columns, "day": [f"d{n // 1000}" for n in range(COUNT)]})
    made.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    return tmp_path / "saved"


def are_in_place(table: SourceTable) -> list[bool]:
    return [
        all(isinstance(place, ArrowRows) for span in fragment.spans for place in places_of(span))
        for fragment in table.fragments
    ]


def test_arrow_files_are_read_where_they_are(saved, store):
    source = vd.huggingface(saved)
    table = split(source, RULE, store=store)
    assert len(table.fragments) >= COUNT / RULE.rows
    assert all(are_in_place(table))
    assert not tables(store.root).child("made").entries()
    rows = read(source, store=store)
    assert rows["id"].to_pylist() == list(range(COUNT))
    # It is the same source as the same rows in memory.
    assert listed(vd.table(rows)) == listed(source)
    assert listed(vd.huggingface(datasets.load_from_disk(str(saved)))) == listed(source)
    in_memory = split(vd.table(rows), RULE, store=store)
    assert [f.identity for f in in_memory.fragments] == [f.identity for f in table.fragments]


def test_the_same_rows_in_other_files(saved, store, tmp_path):
    first = vd.huggingface(saved)
    rows = read(first, store=store)
    saved.rename(tmp_path / "moved")
    moved = vd.huggingface(tmp_path / "moved")
    assert listed(moved) == listed(first)
    assert all(are_in_place(split(moved, RULE, store=store)))
    assert read(moved, store=store) == rows
    copied = vd.huggingface(tmp_path / "moved", copy=True)
    assert listed(copied) == listed(first)
    assert not any(are_in_place(split(copied, RULE, store=store)))
    assert read(copied, store=store) == rows


CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "none": (lambda d: d, True),
    "a range": (lambda d: d.select(range(1_200, 2_900)), True),
    "a range of a range": (lambda d: d.select(range(100, 2_900)).select(range(50, 2_000)), True),
    "fewer columns": (lambda d: d.remove_columns("day"), True),
    "chosen columns": (lambda d: d.select_columns(["text", "id"]), True),
    "renamed": (lambda d: d.rename_columns({"text": "body", "id": "key"}), False),
    "renamed and removed": (lambda d: d.rename_column("text", "id2").remove_columns("id"), False),
    "split": (lambda d: d.train_test_split(0.1, shuffle=False)["test"], True),
    "shards": (lambda d: d.shard(3, 1), True),
    "two of a kind": (lambda d: datasets.concatenate_datasets([d, d.select(range(10))]), True),
    "formatted": (lambda d: d.with_format("numpy", columns=["id"]), True),
    "mapped": (lambda d: d.map(lambda row: {"length": len(row["text"])}), True),
    "another type": (lambda d: d.cast_column("id", datasets.Value("int32")), True),
    "an added column": (lambda d: d.add_column("more", list(range(len(d)))), False),
    "shuffled": (lambda d: d.shuffle(seed=1), False),
    "sorted": (lambda d: d.sort("text"), False),
    "every other row": (lambda d: d.select(range(0, COUNT, 2)), False),
    "flattened": (lambda d: d.shuffle(seed=1).flatten_indices(), True),
    "mapped in memory": (lambda d: d.map(lambda row: row, keep_in_memory=True), False),
    "with another in memory": (
        lambda d: datasets.concatenate_datasets([d, datasets.Dataset.from_dict(d[:10])]),
        None,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_view_of_a_dataset(name, saved, store):
    change, in_place = CHANGES[name]
    dataset = change(datasets.load_from_disk(str(saved)))
    source = vd.huggingface(dataset)
    expected = pa.table(dataset.with_format(None).to_dict()).select(dataset.column_names)
    rows = read(source, store=store)
    assert rows.schema.names == dataset.column_names
    assert rows.cast(expected.schema).equals(expected)
    if in_place is not None:
        assert all(are_in_place(split(source, RULE, store=store))) == in_place


def test_the_content_of_a_mapped_function_counts(saved, store):
    def made(factor: int) -> Any:
        dataset = datasets.load_from_disk(str(saved))
        # The library's own fingerprint is the same for both.
        return dataset.map(
            lambda row: {"n": row["id"] * factor}, new_fingerprint="same", keep_in_memory=True
        )

    one, two = made(2), made(3)
    assert one._fingerprint == two._fingerprint
    assert listed(vd.huggingface(one)) != listed(vd.huggingface(two))


def test_partitions(saved, store):
    source = vd.huggingface(saved, partition_column="day")
    rows = read(source, partition="d1", store=store)
    assert rows["id"].to_pylist() == list(range(1_000, 2_000))
    assert all(are_in_place(split(source, RULE, "d1", store)))
    shuffled = vd.huggingface(
        datasets.load_from_disk(str(saved)).shuffle(seed=3), partition_column="day"
    )
    assert sorted(read(shuffled, partition="d2", store=store)["id"].to_pylist()) == list(
        range(2_000, 3_000)
    )
    with pytest.raises(vd.errors.SourceError, match=r"day = x has no rows"):
        listed(source, "x")
    unknown = vd.huggingface(saved, partition_column="month")
    with pytest.raises(
        vd.errors.SourceError, match="the source has no column 'month'; it has 'id'"
    ):
        listed(unknown, "x")
    parts = dg.StaticPartitionsDefinition(["d1"])
    with pytest.raises(vd.DefinitionError, match="partition_column="):
        vd.Pipeline("docs", source=vd.huggingface(saved), id="id", partitions_def=parts)


def test_a_file_that_was_replaced_or_is_gone(saved, store):
    source = vd.huggingface(saved)
    table = split(source, RULE, store=store)
    reader, context = source.bind(store).for_workers(), ReadContext("here")
    files = sorted(saved.glob("*.arrow"))
    os.utime(files[0], (1, 1))
    with pytest.raises(vd.errors.SourceError, match="was replaced since the run was planned"):
        reader.read(table.fragments[0], table.schema, context)
    files[1].unlink()
    with pytest.raises(vd.errors.SourceError, match="is not on this machine, or was"):
        reader.read(table.fragments[-1], table.schema, context)


def test_folders_of_data_files_and_splits(tmp_path, store):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, start in (("train", 0), ("test", 100)):
        pq.write_table(pa.table({"id": range(start, start + 10)}), folder / f"{name}.parquet")
    given = {"cache_dir": str(tmp_path / "cache")}
    source = vd.huggingface(str(folder), split="test", **given)
    assert read(source, store=store)["id"].to_pylist() == list(range(100, 110))
    assert all(are_in_place(split(source, RULE, store=store)))
    files = {"train": str(folder / "train.parquet")}
    assert len(read(vd.huggingface("parquet", data_files=files, **given), store=store)) == 10
    sliced = vd.huggingface(str(folder), split="train[:3]", **given)
    assert len(read(sliced, store=store)) == 3
    for split_name in (None, "valid"):
        unknown = vd.huggingface(str(folder), split=split_name, **given)
        with pytest.raises(vd.errors.SourceError, match=r"split|valid"):
            listed(unknown)
    both = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"id": [1]}) for name in ("a", "b")}
    )
    both.save_to_disk(str(tmp_path / "both"))
    for given_dict in (both, str(tmp_path / "both")):
        assert len(read(vd.huggingface(given_dict, split="a"), store=store)) == 1
        with pytest.raises(vd.errors.SourceError, match="split is None; expected one of 'a', 'b'"):
            listed(vd.huggingface(given_dict))


def test_a_dataset_that_cannot_be_loaded(tmp_path):
    with pytest.raises(vd.errors.SourceError, match=r"dataset '.*missing' cannot be loaded"):
        listed(vd.huggingface(str(tmp_path / "missing")))


def png(color: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (color, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def test_images_are_bytes_and_a_changed_file_counts(tmp_path, store):
    files = [tmp_path / f"{n}.png" for n in range(3)]
    for n, file in enumerate(files):
        file.write_bytes(png(n))

    def images() -> Any:
        made = datasets.Dataset.from_dict({"id": [0, 1, 2], "image": [str(f) for f in files]})
        return made.cast_column("image", datasets.Image())

    source = vd.huggingface(images())
    rows = read(source, store=store)
    assert rows["image"].type == pa.struct({"bytes": pa.binary(), "path": pa.string()})
    assert [row["bytes"] for row in rows["image"].to_pylist()] == [png(n) for n in range(3)]
    files[1].write_bytes(png(9))
    assert listed(vd.huggingface(images())) != listed(source)

    images().save_to_disk(str(tmp_path / "images"))  # with the content
    stored = vd.huggingface(str(tmp_path / "images"))
    assert all(are_in_place(split(stored, RULE, store=store)))
    found = read(stored, store=store)["image"].to_pylist()
    assert np.asarray(Image.open(io.BytesIO(found[1]["bytes"])))[0, 0].tolist() == [9, 0, 0]


def test_sounds_are_bytes(tmp_path, store):
    content = b"RIFF not decoded"
    made = datasets.Dataset.from_dict({"id": [0], "sound": [{"bytes": content, "path": "a.wav"}]})
    made = made.cast_column("sound", datasets.Audio(decode=False))
    rows = read(vd.huggingface(made), store=store)
    assert rows["sound"].to_pylist() == [{"bytes": content, "path": "a.wav"}]


def test_arrays_and_labels_are_read_as_stored(store):
    features = datasets.Features(
        {
            "id": datasets.Value("int64"),
            "box": datasets.Array2D((2, 2), "float32"),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
        }
    )
    values = {"id": [1, 2], "box": [[[1, 2], [3, 4]]] * 2, "label": ["cat", "dog"]}
    rows = read(vd.huggingface(datasets.Dataset.from_dict(values, features)), store=store)
    assert rows["box"].to_pylist() == [[[1.0, 2.0], [3.0, 4.0]]] * 2
    assert rows["label"].to_pylist() == [0, 1]


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (5, {}, r"path is a builtins.int; expected a datasets.Dataset.*Make one of an Iterable"),
        ("x", {"streaming": True}, "make a dataset of the stream"),
        (
            lambda: datasets.Dataset.from_dict({"id": [1]}),
            {"name": "x"},
            "is loaded already. Leave",
        ),
    ],
)
def test_wrong_declarations(given, options, message):
    path = given() if callable(given) else given
    with pytest.raises(vd.DefinitionError, match=message):
        vd.huggingface(path, **options)
