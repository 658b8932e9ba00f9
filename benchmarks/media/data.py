"""The input files of each workload, written on the spot, the same on every machine."""

from __future__ import annotations

import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np

WORDS = ["river", "stone", "quiet", "engine", "paper", "morning", "signal", "garden", "copper"]
RATE = 16_000
LINE_WORDS, PAGE_LINES = 14, 48


def write_audio(path: Path, random: np.random.Generator) -> None:
    """Write 5 seconds of tones in noise as 16-bit mono WAV at 16 kHz.

    Args:
        path: The file.
        random: The source of its content.
    """
    time = np.arange(5 * RATE) / RATE
    tones = sum(np.sin(2 * np.pi * f * time) for f in random.uniform(100, 4000, 4))
    sound = 0.15 * tones + 0.05 * random.standard_normal(len(time))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())


def write_document(path: Path, random: np.random.Generator) -> None:
    """Write a PDF of 4 pages, each with about 4,000 characters of text.

    Args:
        path: The file.
        random: The source of its content.
    """
    import pymupdf

    document = pymupdf.open()
    for _ in range(4):
        lines = [" ".join(random.choice(WORDS, LINE_WORDS)) for _ in range(PAGE_LINES)]
        document.new_page().insert_text((36, 48), lines, fontsize=9)
    document.save(str(path))


def write_image(path: Path, random: np.random.Generator) -> None:
    """Write a JPEG photo of 500 x 375: soft colours, edges and a little noise.

    Args:
        path: The file.
        random: The source of its content.
    """
    from PIL import Image

    coarse = Image.fromarray(random.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    photo = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)).astype(np.int16)
    for _ in range(6):
        left, top = random.integers(0, 400), random.integers(0, 300)
        photo[top : top + 60, left : left + 80] = random.integers(0, 256, 3)
    photo += random.integers(-6, 7, photo.shape, dtype=np.int16)
    Image.fromarray(np.clip(photo, 0, 255).astype(np.uint8)).save(path, quality=90)


def write_video(path: Path, random: np.random.Generator) -> None:
    """Write an MP4 of 24 frames of 640 x 360, in which rectangles move.

    Args:
        path: The file.
        random: The source of its content.
    """
    import av
    from PIL import Image

    coarse = Image.fromarray(random.integers(0, 256, (6, 10, 3), dtype=np.uint8))
    background = np.asarray(coarse.resize((640, 360), Image.Resampling.BICUBIC))
    starts, steps = random.integers(0, 250, (5, 2)), random.integers(-4, 5, (5, 2))
    colors = random.integers(0, 256, (5, 3))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=12)
        stream.width, stream.height, stream.pix_fmt = 640, 360, "yuv420p"
        for number in range(24):
            frame = background.copy()
            for (left, top), color in zip(np.abs(starts + number * steps), colors):
                frame[top : top + 90, left : left + 120] = color
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


WRITERS: dict[str, tuple[str, Callable[[Path, np.random.Generator], None]]] = {
    "audio": ("wav", write_audio),
    "documents": ("pdf", write_document),
    "images": ("jpg", write_image),
    "video": ("mp4", write_video),
}
"""By workload, the extension of its files and the function that writes one."""


def generate(key: str, folder: Path, partitions: int, files: int) -> list[Path]:
    """Write the files of a workload.

    Args:
        key: The workload.
        folder: The folder to write to.
        partitions: Number of partitions, each a folder.
        files: Files per partition.

    Returns:
        The folders of the partitions.
    """
    extension, write = WRITERS[key]
    folders = [folder / f"p{number}" for number in range(partitions)]
    for number, partition in enumerate(folders):
        partition.mkdir(parents=True)
        for file in range(files):
            random = np.random.default_rng([number, file])
            write(partition / f"{number}-{file:03}.{extension}", random)
    return folders
