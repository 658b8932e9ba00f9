"""The media benchmark: its files, the functions that read them, its checks and its line count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.media import __main__ as media
from benchmarks.media.data import RATE, generate
from benchmarks.media.models import CHUNK, OVERLAP, pdf_chunks, video_frames, wav_samples
from benchmarks.media.workloads import MEDIA, compare


def test_clips_are_read_and_pages_cut_into_chunks_that_overlap(
    tmp_path: Path,
) -> None:
    (folder,) = generate("audio", tmp_path / "audio", 1, 1)
    samples = wav_samples((folder / "0-000.wav").read_bytes())
    assert (samples.dtype, samples.shape) == (np.float32, (5 * RATE,))
    (folder,) = generate("documents", tmp_path, 1, 1)
    chunks = list(pdf_chunks((folder / "0-000.pdf").read_bytes()))
    assert [(row["page"], row["chunk"]) for row in chunks[:4]] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert {row["page"] for row in chunks} == {0, 1, 2, 3}
    assert len(chunks[0]["text"]) == CHUNK
    assert chunks[0]["text"][-OVERLAP:] == chunks[1]["text"][:OVERLAP]


def test_a_video_is_read_as_frames(tmp_path: Path) -> None:
    (folder,) = generate("video", tmp_path, 1, 1)
    frames = list(video_frames((folder / "0-000.mp4").read_bytes()))
    assert [frame["frame_index"] for frame in frames] == list(range(24))
    assert {frame["data"].shape for frame in frames} == {(224, 224, 3)}
    assert not np.array_equal(frames[0]["data"], frames[-1]["data"])


EXPECTED = {(f"{n}.wav",): {"path": f"{n}.wav", "text": f"t{n}"} for n in range(20)}


def differences(folder: Path, table: pa.Table) -> list[str]:
    pq.write_table(table, folder / "0.parquet")
    return compare(MEDIA["audio"], EXPECTED, [folder / "0.parquet"])


def output(**changed: str) -> pa.Table:
    names = [f"file:///in/{n}.wav" for n in range(20)]
    return pa.table({"path": names, "text": [changed.get(f"t{n}", f"t{n}") for n in range(20)]})


def test_rows_in_any_order_are_right_and_a_path_counts_by_its_name(tmp_path: Path) -> None:
    assert differences(tmp_path, output().take(list(range(20))[::-1])) == []


def test_lost_rows_and_columns_are_found(tmp_path: Path) -> None:
    (found,) = differences(tmp_path, output().drop_columns(["text"]))
    assert found == "columns of 0.parquet: ['text'] missing"
    rows, ids = differences(tmp_path, output().slice(1))
    assert rows == "rows: expected 20, got 19"
    assert ids == "missing ids: 1 of 20, such as ('0.wav',)"
    assert compare(MEDIA["audio"], EXPECTED, [])[0] == "rows: expected 20, got 0"


def test_few_values_may_differ_and_no_more(tmp_path: Path) -> None:
    assert differences(tmp_path, output(t3="other")) == []
    (found,) = differences(tmp_path, output(t3="other", t4="other"))
    assert found == "values: 18 of 20 rows agree with a plain loop, expected 95%"


@pytest.mark.parametrize("key", MEDIA)
def test_every_contender_has_a_file_of_each_workload(key: str) -> None:
    for contender in media.CONTENDERS:
        assert media.lines(key, contender.key) > 5
