"""Hugging Face datasets as sources: where rows are read, what identifies them, and errors."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import vane_dagster as vd
from support.ingested import listed, read, split
from vane_dagster._lazy import LazyModule
from vane_dagster.sources import FragmentRule

os.environ["HF_HUB_OFFLINE"] = "1"  # the library reads it when it is imported
datasets: Any = LazyModule("datasets")

# The library gives pyarrow an argument that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")
COUNT = 3_000
RULE = FragmentRule(500)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A dataset that was saved to disk in two shards."""
    columns = {"id": range(COUNT), "text": [f"text {n}" for n in range(COUNT)]}
    made = datasets.Dataset.from_dict({**columns, "day": [f"d{n // 1000}" for n in range(COUNT)]})
    made.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    return tmp_path / "saved"


def test_rows_are_identified_by_their_content(saved, store, tmp_path):
    source = vd.huggingface(saved)
    table, rows = split(source, RULE, store=store), read(source, RULE, store=store)
    assert len(table.fragments) >= COUNT / RULE.rows
    assert rows["id"].to_pylist() == list(range(COUNT))
    assert listed(vd.huggingface(datasets.load_from_disk(str(saved)))) == listed(source)
    # It is the same source as the same rows in memory, or elsewhere.
    assert listed(vd.table(rows)) == listed(source)
    assert split(vd.table(rows), RULE, store=store) == table
    saved.rename(tmp_path / "moved")
    assert listed(vd.huggingface(tmp_path / "moved")) == listed(source)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "chosen columns": lambda d: d.select_columns(["text", "id"]),
    "renamed": lambda d: d.rename_columns({"text": "body", "id": "key"}),
    "two of a kind": lambda d: datasets.concatenate_datasets([d, d.select(range(10))]),
    "mapped": lambda d: d.map(lambda row: {"length": len(row["text"])}),
    "shuffled": lambda d: d.shuffle(seed=1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_view_of_a_dataset(name, saved, store):
    dataset = CHANGES[name](datasets.load_from_disk(str(saved)))
    expected = pa.table(dataset.with_format(None).to_dict()).select(dataset.column_names)
    rows = read(vd.huggingface(dataset), RULE, store=store)
    assert rows.schema.names == dataset.column_names
    assert rows.cast(expected.schema).equals(expected)


def test_folders_of_data_files_and_splits(tmp_path, store):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, start in (("train", 0), ("test", 100)):
        pq.write_table(pa.table({"id": range(start, start + 10)}), folder / f"{name}.parquet")
    given = {"cache_dir": str(tmp_path / "cache")}
    source = vd.huggingface(str(folder), split="test", **given)
    assert read(source, RULE, store=store)["id"].to_pylist() == list(range(100, 110))
    files = {"train": str(folder / "train.parquet")}
    assert len(read(vd.huggingface("parquet", data_files=files, **given), RULE, store=store)) == 10
    sliced = vd.huggingface(str(folder), split="train[:3]", **given)
    assert len(read(sliced, RULE, store=store)) == 3
    for split_name in (None, "valid"):
        unknown = vd.huggingface(str(folder), split=split_name, **given)
        with pytest.raises(vd.errors.SourceError, match=r"split|valid"):
            listed(unknown)
    both = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"id": [1]}) for name in ("a", "b")}
    )
    both.save_to_disk(str(tmp_path / "both"))
    for given_dict in (both, str(tmp_path / "both")):
        assert len(read(vd.huggingface(given_dict, split="a"), RULE, store=store)) == 1
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
    rows = read(source, RULE, store=store)
    assert rows["image"].type == pa.struct({"bytes": pa.binary(), "path": pa.string()})
    assert [row["bytes"] for row in rows["image"].to_pylist()] == [png(n) for n in range(3)]
    files[1].write_bytes(png(9))
    assert listed(vd.huggingface(images())) != listed(source)

    images().save_to_disk(str(tmp_path / "images"))  # with the content
    stored = vd.huggingface(str(tmp_path / "images"))
    found = read(stored, RULE, store=store)["image"].to_pylist()
    assert np.asarray(Image.open(io.BytesIO(found[1]["bytes"])))[0, 0].tolist() == [9, 0, 0]


def test_sounds_arrays_and_labels_are_read_as_stored(store):
    features = {
        "box": datasets.Array2D((2, 2), "float32"),
        "label": datasets.ClassLabel(names=["cat", "dog"]),
        "sound": datasets.Audio(decode=False),
    }
    sound = {"bytes": b"RIFF not decoded", "path": "a.wav"}
    row = {"id": 1, "box": [[1.0, 2.0], [3.0, 4.0]], "label": 1, "sound": sound}
    made = datasets.Dataset.from_list([row])
    for name, kind in features.items():
        made = made.cast_column(name, kind)
    assert read(vd.huggingface(made), RULE, store=store).to_pylist() == [row]


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (5, {}, r"path is a builtins.int; expected a datasets.Dataset.*Make one of an Iterable"),
        ("x", {"streaming": True}, "make a dataset of the stream"),
        (
            lambda: datasets.Dataset.from_dict({"id": [1]}),
            {"name": "x"},
            "is already loaded. Leave",
        ),
    ],
)
def test_wrong_declarations(given, options, message):
    path = given() if callable(given) else given
    with pytest.raises(vd.errors.DefinitionError, match=message):
        vd.huggingface(path, **options)
