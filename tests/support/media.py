"""Images, sounds and documents as tests need them: small, and made on the spot."""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np
from PIL import Image

PDF = b"%PDF-1.7\n%%EOF\n"
PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def picture(
    kind: str = "PNG", size: tuple[int, int] = (6, 4), color: str = "navy", **options: Any
) -> bytes:
    """Encode an image of one color; its size is width and height."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, kind, **options)
    return file.getvalue()


def tone(hertz: float, seconds: float = 0.5, rate: int = 16_000) -> np.ndarray:
    return (np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate) * 2**14).astype("<i2")


def sound(samples: np.ndarray | None = None, rate: int = 8000) -> bytes:
    """Encode samples as a WAV file; by default a tenth of a second of silence."""
    samples = tone(0, 0.1, rate) if samples is None else samples
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, rate, 0, "NONE", ""))
        written.writeframes(samples.tobytes())
    return file.getvalue()
