"""Runs over raw files and images: functions that open files, changes, and files that are broken."""

from __future__ import annotations

import os
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
from support.results import failure, metadata
from vane_dagster.errors import TraceError

DAYS = dg.StaticPartitionsDefinition(["may", "june"])


def words(file: vd.File) -> int:
    return len(file.read().split())


def lines(file: vd.File) -> list[str]:
    with file.open("r") as stream:
        return [line.strip() for line in stream]


def seconds(row: dict[str, Any]) -> float:
    with vd.File(row["path"]).to_tempfile() as copied, wave.open(copied.name) as sound:
        return sound.getnframes() / sound.getframerate()


def rewrite(file: vd.File) -> int:
    text = file.read()
    Path(file.path).write_bytes(text + b" more")
    return len(text)


def brightness(batch: dict[str, Any]) -> dict[str, Any]:
    return {"mean": batch["image"].mean(axis=(1, 2, 3))}


def write_texts(folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        (folder / f"{n:02d}.txt").write_text("\n".join(["word word"] * (n + 1)))


def test_functions_read_files_and_changes_are_computed(tmp_path, compute, materialize):
    for day in ("may", "june"):
        write_texts(tmp_path / day, 12)
    source = vd.files(f"{tmp_path}/{{partition_key}}/*.txt")
    raw = vd.Pipeline("raw", source=source, partitions_def=DAYS)
    raw.map("counted", words)
    raw.flat_map("lines", lines, id="line_id", schema={"line": "VARCHAR"})

    materialize(raw, compute, "may")
    found = read_stage(tmp_path / "store", "raw", "counted", "may").sort_by("path")
    assert found["path"].to_pylist() == [f"{tmp_path}/may/{n:02d}.txt" for n in range(12)]
    assert found["counted"].to_pylist() == [2 * (n + 1) for n in range(12)]
    assert read_stage(tmp_path / "store", "raw", "lines", "may").num_rows == 78

    os.utime(tmp_path / "may/03.txt")
    again = materialize(raw, compute, "may")
    assert metadata(again, "counted")["fragments_computed"] == 0
    (tmp_path / "may/03.txt").write_text("one")
    changed = materialize(raw, compute, "may")
    assert metadata(changed, "counted")["fragments_computed"] == 1
    found = read_stage(tmp_path / "store", "raw", "counted", "may").sort_by("path")
    assert found["counted"].to_pylist()[3] == 1

    path = f"{tmp_path}/may/03.txt"
    (step, *_) = vd.trace(
        raw["counted"], path, partition="may", store=str(tmp_path / "store")
    ).steps
    assert (step.url, step.row) == (f"file://{path}", 0)


def test_files_are_opened_with_the_options_of_the_source(tmp_path, s3, compute, materialize):
    fs = fsspec.filesystem("s3", **s3)
    for name, length in (("a", 8000), ("b", 4000)):
        with fs.open(f"lake/sounds/{name}.wav", "wb") as stream, wave.open(stream, "wb") as sound:
            sound.setparams((1, 2, 8000, 0, "NONE", ""))
            sound.writeframes(b"\0\0" * length)
    with fs.open("lake/sounds/broken.wav", "wb") as stream:
        stream.write(b"RIFF")
    source = vd.files("s3://lake/sounds/*.wav", storage_options=s3)
    raw = vd.Pipeline("raw", source=source)
    raw.map("seconds", seconds, on_error="quarantine")

    materialize(raw, compute)
    store = str(tmp_path / "store")
    found = vd.load(raw["seconds"], store=store).sort_by("path")
    assert found["path"].to_pylist() == ["s3://lake/sounds/a.wav", "s3://lake/sounds/b.wav"]
    assert found["seconds"].to_pylist() == [1.0, 0.5]
    (fault,) = vd.quarantine(raw["seconds"], store=store).to_pylist()
    assert (fault["id"], fault["error"]) == ("s3://lake/sounds/broken.wav", "EOFError")


def test_a_file_that_changes_during_the_run_fails_it(tmp_path, local, materialize):
    write_texts(tmp_path / "texts", 3)
    raw = vd.Pipeline("raw", source=vd.files(str(tmp_path / "texts")))
    raw.map("counted", rewrite, on_error="quarantine")
    result = materialize(raw, local, raises=False)
    assert "was replaced while the run read it" in failure(result)


@pytest.fixture
def pictures(tmp_path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for n in range(40):
        Image.fromarray(np.full((20, 30, 3), 5 * n, np.uint8)).save(folder / f"{n:02d}.png")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "empty.png").write_bytes(b"")
    return folder


def test_images_that_are_broken_cost_their_own_rows(tmp_path, pictures, compute, materialize):
    source = vd.images(str(pictures), size=(8, 8))
    pics = vd.Pipeline("pics", source=source)
    bright = pics.map_batches(
        "bright", brightness, schema={"mean": "DOUBLE"}, batch_format="numpy", batch_size=4,
        concurrency=2,
    )  # fmt: skip
    pics.project("corner", {"corner": "image[1]"})
    named = pics.project("named", {"letters": "length(path)"})
    pics.join("both", named, source_columns=["image"])

    result = materialize(pics, compute)
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
    materialize(pics, compute)
    assert vd.load(bright, store=store).num_rows == 41
