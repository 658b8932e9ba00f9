"""The media workloads: their sizes, and how their output is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Bench
from benchmarks.media import models
from benchmarks.media.data import generate

PARTITIONS, STEPS_PER_PROCESS = 3, 2
EVERY = 8
"""One row in so many is compared with what a plain loop computes."""


@dataclass(frozen=True)
class Media:
    """A workload.

    Args:
        key: Its name.
        title: One line for the report.
        unit: What a row of its output is.
        files: Files of a partition, and of one of the smoke test.
        ids: The output columns that identify a row; a path counts by its last part.
        values: The output columns that the model computes.
        agree: The share of rows whose values have to equal those of a plain loop.
        compute: Returns the rows of files, each with the values of one in `EVERY`.
    """

    key: str
    title: str
    unit: str
    files: tuple[int, int]
    ids: tuple[str, ...]
    values: tuple[str, ...]
    agree: float
    compute: Callable[[Sequence[Path]], list[dict[str, Any]]]


def _sampled(
    rows: list[dict[str, Any]], compute: Callable[[list[dict[str, Any]]], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Add what `compute` returns for one in `EVERY` rows to these rows."""
    columns = compute(rows[::EVERY])
    for position, row in enumerate(rows[::EVERY]):
        row.update({name: values[position] for name, values in columns.items()})
    return rows


def _rows(
    files: Sequence[Path], cut: Callable[[bytes], Iterator[dict[str, Any]]]
) -> list[dict[str, Any]]:
    return [{"path": file, **row} for file in files for row in cut(file.read_bytes())]


def _audio(files: Sequence[Path]) -> list[dict[str, Any]]:
    model = models.Whisper()
    rows = [{"path": file} for file in files]
    waves = [models.wav_samples(file.read_bytes()) for file in files[::EVERY]]
    return _sampled(rows, lambda chosen: {"text": model.transcribe(waves)})


def _documents(files: Sequence[Path]) -> list[dict[str, Any]]:
    model = models.MiniLM()
    chunks = [
        {"path": file, **row} for file in files for row in models.pdf_chunks(file.read_bytes())
    ]
    return _sampled(
        chunks, lambda chosen: {"embedding": model.embed([row["text"] for row in chosen])}
    )


def _images(files: Sequence[Path]) -> list[dict[str, Any]]:
    from PIL import Image

    model = models.ResNet()
    size, method = (models.SIZE, models.SIZE), Image.Resampling.BILINEAR
    pictures = [np.asarray(Image.open(file).resize(size, method)) for file in files[::EVERY]]
    rows = [{"path": file} for file in files]
    return _sampled(rows, lambda chosen: {"label": model.classify(np.stack(pictures))})


def _video(files: Sequence[Path]) -> list[dict[str, Any]]:
    model = models.Yolos()
    rows = [
        {"path": file, **row} for file in files for row in models.video_frames(file.read_bytes())
    ]

    def detections(chosen: list[dict[str, Any]]) -> Mapping[str, Any]:
        found = model.detect(np.stack([row["data"] for row in chosen]))
        return dict(zip(("labels", "scores", "boxes"), found))

    return _sampled(rows, detections)


MEDIA = {
    media.key: media
    for media in (
        Media(
            "audio", "Clips of 5 s through Whisper", "clips", (96, 8), ("path",), ("text",),
            0.95, _audio,
        ),
        Media(
            "documents", "PDFs in chunks through MiniLM", "chunks", (24, 2),
            ("path", "page", "chunk"), ("text", "embedding"), 1.0, _documents,
        ),
        Media(
            "images", "JPEGs through ResNet-18", "images", (256, 16), ("path",), ("label",),
            0.7, _images,
        ),
        Media(
            "video", "Frames of videos through YOLOS", "frames", (12, 1),
            ("path", "frame_index"), ("labels", "scores", "boxes"), 0.95, _video,
        ),
    )
}  # fmt: skip


def prepare(media: Media, quick: bool, folder: Path) -> tuple[Bench, int]:
    """Write the files and compute the expected output.

    Args:
        media: The workload.
        quick: Whether it has the sizes of the smoke test.
        folder: A short folder to write to.

    Returns:
        The bench, and the number of rows of a partition's output.
    """
    partitions = generate(media.key, folder / "in", PARTITIONS, media.files[quick])
    files = [path for partition in partitions for path in sorted(partition.iterdir())]
    expected: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {p.name: {} for p in partitions}
    for row in media.compute(files):
        expected[row["path"].parent.name][_id(media, row)] = row

    def differences(name: str, paths: Sequence[Path]) -> list[str]:
        return compare(media, expected[name], paths)

    bench = Bench(
        media.key, quick, folder, partitions, differences, steps_per_process=STEPS_PER_PROCESS
    )
    return bench, len(expected[partitions[0].name])


def _id(media: Media, row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (Path(row["path"]).name, *(row[name] for name in media.ids[1:]))


def compare(
    media: Media, expected: Mapping[tuple[Any, ...], Mapping[str, Any]], paths: Sequence[Path]
) -> list[str]:
    """Describe how output differs from the expected rows.

    Args:
        media: The workload.
        expected: By id, the expected rows; some have values.
        paths: The Parquet files of the output.
    """
    names = [*media.ids, *media.values]
    tables = [pq.ParquetFile(path).read() for path in paths]
    for path, table in zip(paths, tables):
        if missing := set(names) - set(table.column_names):
            return [f"columns of {path.name}: {sorted(missing)} missing"]
    rows = pa.concat_tables([table.select(names) for table in tables]).to_pylist() if tables else []
    found = {_id(media, row): row for row in rows}
    problems = []
    if len(rows) != len(expected):
        problems.append(f"rows: expected {len(expected)}, got {len(rows)}")
    if lost := set(expected) - set(found):
        problems.append(f"missing ids: {len(lost)} of {len(expected)}, such as {min(lost)}")
    sample = [id for id, row in expected.items() if media.values[-1] in row and id in found]
    equal = sum(_equal(media, expected[id], found[id]) for id in sample)
    if equal < media.agree * len(sample):
        problems.append(
            f"values: {equal} of {len(sample)} rows agree with a plain loop, "
            f"expected {media.agree:.0%}"
        )
    return problems


def _equal(media: Media, expected: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    return all(
        expected[name] == found[name]
        if isinstance(expected[name], str)
        else np.allclose(expected[name], found[name], rtol=1e-4, atol=1e-5)
        for name in media.values
    )
