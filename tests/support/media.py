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


def sound() -> bytes:
    """Return a WAV file of a tenth of a second of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, 8000, 0, "NONE", ""))
        written.writeframes(bytes(1600))
    return file.getvalue()
