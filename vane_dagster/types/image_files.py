"""Image files, opened and converted by Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

MAX_PIXELS = 89_478_485
"""The most pixels of an image by default: Pillow's own limit against decompression bombs."""


def opened(data: bytes, max_pixels: int | None = None) -> Any:
    """Open an encoded image, and read its header. Larger images raise an error of Pillow.

    Without `max_pixels`, the limit is `MAX_PIXELS`.
    """
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise UnidentifiedImageError("the image file is empty")
    limit = f"the fixed limit of {MAX_PIXELS}; scale it down in a stage before"
    limit = limit if max_pixels is None else f"max_pixels={max_pixels}"
    max_pixels = max_pixels or MAX_PIXELS
    # Pillow refuses an image of twice its own limit before its size is known.
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    try:
        image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        raise UnidentifiedImageError("not an image in a format that Pillow can read") from error
    except Image.DecompressionBombError as error:
        raise Image.DecompressionBombError(f"it has more pixels than {limit}") from error
    if (pixels := image.height * image.width) > max_pixels:
        raise Image.DecompressionBombError(
            f"{image.width} x {image.height} are {pixels} pixels, more than {limit}"
        )
    return image


def converted(image: Any, mode: str) -> Any:
    """Convert an image to another mode; the first frame of an animation."""
    from PIL import Image

    if image.mode in ("P", "PA") and mode != "L":  # palettes may have transparency
        image = image.convert("RGBA")
    if image.mode.startswith("I;16") or image.mode == "I":  # Pillow would clip 16 bits to 8
        values = np.asarray(image).astype(np.float64) / 257
        image = Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    return image.convert(mode)
