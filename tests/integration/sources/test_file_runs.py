"""Runs over raw files: functions that open them, and files that change."""

from __future__ import annotations

import uuid
import wave
from typing import Any

import dagster as dg
import fsspec

import vane_dagster as vd
from support.results import metadata

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
