"""Runs over raw files, images and tables: functions that open files, changes, and broken files."""

from __future__ import annotations

import json
import uuid
import wave
from pathlib import Path
from typing import Any

import dagster as dg
import fsspec
import numpy as np
import pytest
from PIL import Image

import vane_dagster as vd
from support.data import read_stage
from support.lakes import Iceberg, lake, made  # noqa: F401  # fixtures
from support.results import metadata
from vane_dagster.errors import TraceError
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store

DAYS = dg.StaticPartitionsDefinition(["may", "june"])


def length(file: vd.File) -> int:
    return len(file.read())


def chunks(file: vd.File) -> list[str]:
    with file.open("rb") as stream:
        return [stream.read(4).decode("latin-1") for _ in range(3)]


def seconds(row: dict[str, Any]) -> float:
    with vd.File(row["path"]).to_tempfile() as copied, wave.open(copied.name) as sound:
        return sound.getnframes() / sound.getframerate()


def write_sound(fs: Any, path: str, frames: int) -> None:
    with fs.open(path, "wb") as stream, wave.open(stream, "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(b"\0\0" * frames)


def brightness(batch: dict[str, Any]) -> dict[str, Any]:
    return {"mean": batch["image"].mean(axis=(1, 2, 3))}


def test_functions_read_files_on_s3_and_changes_are_computed(tmp_path, s3, local, materialize):
    fs, place = fsspec.filesystem("s3", **s3), f"lake/{uuid.uuid4().hex}"
    for day in ("may", "june"):
        for number in range(4):
            write_sound(fs, f"{place}/{day}/{number:02d}.wav", 800 * (number + 1))
    with fs.open(f"{place}/may/broken.wav", "wb") as stream:
        stream.write(b"RIFF")
    source = vd.files(f"s3://{place}/{{partition_key}}/*.wav", storage_options=s3)
    raw = vd.Pipeline("raw", source=source, partitions_def=DAYS)
    raw.map("length", length)
    raw.map("seconds", seconds, on_error="quarantine")
    raw.flat_map("chunks", chunks, id="chunk_id", schema={"chunk": "VARCHAR"})
    store, paths = str(tmp_path / "store"), [f"s3://{place}/may/{n:02d}.wav" for n in range(4)]

    # Functions open the files with the options of the source. Broken ones cost their rows.
    materialize(raw, local, "may")
    found = vd.load(raw["seconds"], "may", store=store).sort_by("path")
    assert found["path"].to_pylist() == paths
    assert found["seconds"].to_pylist() == [(n + 1) / 10 for n in range(4)]
    (fault,) = vd.quarantine(raw["seconds"], "may", store=store).to_pylist()
    assert (fault["id"], fault["error"]) == (f"s3://{place}/may/broken.wav", "EOFError")
    lengths = vd.load(raw["length"], "may", store=store).sort_by("path")["length"].to_pylist()
    assert lengths == [44 + 1600 * (n + 1) for n in range(4)] + [4]
    read = vd.load(raw["chunks"], "may", store=store)["chunk"].to_pylist()
    assert (read[0], read[2], len(read)) == ("RIFF", "WAVE", 15)

    # Files that did not change are not read again.
    again = materialize(raw, local, "may")
    assert metadata(again, "length")["fragments_computed"] == 0
    write_sound(fs, f"{place}/may/03.wav", 1)
    changed = materialize(raw, local, "may")
    assert metadata(changed, "length")["fragments_computed"] == 1
    lengths = vd.load(raw["length"], "may", store=store).sort_by("path")["length"].to_pylist()
    assert lengths[3] == 46
    (step, *_) = vd.trace(raw["length"], paths[3], partition="may", store=store).steps
    assert (step.url, step.row) == (paths[3], 0)


@pytest.fixture
def pictures(tmp_path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for n in range(40):
        Image.fromarray(np.full((20, 30, 3), 5 * n, np.uint8)).save(folder / f"{n:02d}.png")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "empty.png").write_bytes(b"")
    return folder


def test_images_that_are_broken_cost_their_own_rows(tmp_path, pictures, local, materialize):
    source = vd.images(str(pictures), size=(8, 8))
    pics = vd.Pipeline("pics", source=source)
    bright = pics.map_batches(
        "bright", brightness, schema={"mean": "DOUBLE"}, batch_format="numpy", batch_size=4,
        concurrency=2,
    )  # fmt: skip
    pics.project("corner", {"corner": "image[1]"})
    named = pics.project("named", {"letters": "length(path)"})
    pics.join("both", named, source_columns=["image"])

    result = materialize(pics, local)
    store = str(tmp_path / "store")
    found = vd.load(bright, store=store).sort_by("path")
    assert found["mean"].to_pylist() == [float(5 * n) for n in range(40)]
    corners = vd.load(pics["corner"], store=store).sort_by("path")
    assert corners["corner"].to_pylist() == [5 * n for n in range(40)]
    assert vd.load(named, store=store).num_rows == 42
    for stage in ("bright", "corner", "both"):
        assert vd.load(pics[stage], store=store).num_rows == 40
        assert metadata(result, stage)["rows_quarantined"] == 2
        assert metadata(result, stage)["rows_unread"] == 2
        faults = vd.quarantine(pics[stage], store=store).sort_by("id").to_pylist()
        assert [(fault["error"], fault["model"]) for fault in faults] == [
            ("UnidentifiedImageError", "source"),
            ("UnidentifiedImageError", "source"),
        ]
    with pytest.raises(TraceError, match=r"UnidentifiedImageError"):
        vd.trace(bright, f"{pictures}/broken.png", store=store)

    Image.fromarray(np.full((8, 8, 3), 255, np.uint8)).save(pictures / "broken.png")
    materialize(pics, local)
    assert vd.load(bright, store=store).num_rows == 41


# Delta, Iceberg and Lance tables


def docs(source: Any) -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=10)
    docs.project("clean", ["n", "text"])
    return docs


def ids(root: Path) -> list[int]:
    return read_stage(root / "store", "docs", "clean").sort_by("id")["id"].to_pylist()


def computed(result: Any) -> int:
    found: int = metadata(result, "clean")["fragments_computed"]
    return found


def details(root: Path) -> list[dict[str, Any]]:
    manifest = Store(Location(str(root / "store"))).in_force("docs", "clean", None)
    assert manifest is not None
    return [json.loads(span.detail) for f in manifest.fragments for span in f.spans]


def test_commits_compute_the_files_that_they_change(tmp_path, lake, local, materialize):
    store, clean = str(tmp_path / "store"), docs(lake.source())["clean"]
    lake.append(made(range(25)))
    assert computed(materialize(docs(lake.source()), local)) == 3
    assert computed(materialize(docs(lake.source()), local)) == 0
    lake.append(made(range(100, 125)))
    assert computed(materialize(docs(lake.source()), local)) == 3
    assert ids(tmp_path) == [*range(25), *range(100, 125)]
    if isinstance(lake, Iceberg):
        assert {each["snapshot"] for each in details(tmp_path)} == {lake.now()}
    step = vd.trace(clean, 103, store=store).steps[0]
    assert (step.url, step.row) == (lake.files()[1], 3)
    assert vd.trace("docs/clean", 103, store=store).steps[0].row == step.row
    assert vd.load(clean, store=store).num_rows == 50

    lake.delete([0, 3, 24])
    assert computed(materialize(docs(lake.source()), local)) == 3
    left = [i for i in range(25) if i not in (0, 3, 24)]
    assert ids(tmp_path) == [*left, *range(100, 125)]
    step = vd.trace(clean, 20, store=store).steps[0]
    assert (step.url, step.row) == (lake.files()[0], left.index(20))
    assert vd.trace(clean, 120, store=store).steps[0].row == 20
