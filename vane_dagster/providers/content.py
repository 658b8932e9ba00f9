"""Content of a prompt besides text: its declaration, and how the values of a column are read."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster._arguments import check_installed, flag, positive, text
from vane_dagster._keywords import known_keywords
from vane_dagster.errors import DefinitionError, first_line, names
from vane_dagster.providers.base import Media
from vane_dagster.types.image_files import converted, opened
from vane_dagster.types.kinds import is_bytes, is_list, is_text
from vane_dagster.types.tensors import row_shape

ReadFile = Callable[[str], bytes]
"""Returns the content of a file that a row names."""

_IMAGES = {
    "JPEG": "image/jpeg",
    "MPO": "image/jpeg",  # a JPEG file with further pictures, as cameras write them
    "PNG": "image/png",
    "GIF": "image/gif",
    "WEBP": "image/webp",
}
"""Formats of images that models take, by their names in Pillow."""
_MARKS = {
    "audio": {
        "audio/wav": re.compile(rb"RIFF....WAVE", re.DOTALL),
        "audio/mpeg": re.compile(rb"ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb]"),
        "audio/flac": re.compile(rb"fLaC"),
        "audio/ogg": re.compile(rb"OggS"),
        "audio/mp4": re.compile(rb"....ftyp", re.DOTALL),
    },
    "document": {"application/pdf": re.compile(rb".{,1019}%PDF-", re.DOTALL)},
}
"""The first bytes of files by kind and media type; those of PDF are in the first 1,024."""
_MODES = ("L", "LA", "RGB", "RGBA")
_QUALITY = 90


@dataclass(frozen=True)
class Content:
    """A part of a message that a column holds: an image, a sound or a document, or a list of them.

    Attributes:
        kind: "image", "audio" or "document".
        column: The column.
        detail: See `image`.
        max_pixels: See `image`.
        fetch_by_provider: Whether the column holds URLs, which the model's server fetches.
    """

    kind: str
    column: str
    detail: str | None = None
    max_pixels: int | None = None
    fetch_by_provider: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return (self.column,)

    @property
    def keyed(self) -> Mapping[str, Any]:
        """The values that change a request, without defaults."""
        options = ("detail", "max_pixels", "fetch_by_provider")
        given = {name: value for name in options if (value := getattr(self, name))}
        return {self.kind: self.column, **given}

    @property
    def needs(self) -> Sequence[str]:
        """What a provider has to take; see `Provider`."""
        url = [f"{self.kind} url"] if self.fetch_by_provider else []
        return [self.kind, *url, *([f"{self.kind} detail"] if self.detail else [])]

    @property
    def expected(self) -> str:
        """The values that it reads, for messages."""
        if self.fetch_by_provider:
            return "http:// or https:// URLs, because of fetch_by_provider"
        tensors = "uint8 tensors of shape (height, width) or (height, width, channels), "
        return f"encoded files (bytes), {tensors if self.kind == 'image' else ''}or paths of files"

    def __str__(self) -> str:
        return f"[{self.kind} `{self.column}`]"

    def fits(self, kind: pa.DataType) -> bool:
        """Return whether a column may hold values that it reads, or lists of them."""
        is_many = is_list(kind) and not self._is_tensor(kind)
        item = kind.value_type if is_many else kind
        if self.fetch_by_provider or pa.types.is_null(item):
            return pa.types.is_null(item) or is_text(item)
        return is_bytes(item) or self._is_tensor(item) or (is_text(item) and not is_many)

    def _is_tensor(self, kind: pa.DataType) -> bool:
        shape = row_shape(kind) if self.kind == "image" else None
        return shape is not None and shape.value_type == pa.uint8() and len(shape.shape) in (2, 3)

    def values(self, row: Mapping[str, Any], read_file: ReadFile | None) -> list[Media]:
        """Read the value of a row, or each value of its list. It may take long."""
        value = row[self.column]
        if isinstance(value, (list, tuple)):
            return [self._media(each) for each in value]
        if isinstance(value, str) and read_file is not None and not self.fetch_by_provider:
            try:
                value = read_file(value)
            except ValueError as error:
                raise ValueError(f"column {self.column!r}: {error}") from error
        return [self._media(value)]

    def _media(self, value: Any) -> Media:
        if self.fetch_by_provider:
            if isinstance(value, str) and value.startswith(("http://", "https://")):
                return Media(self.kind, url=value, detail=self.detail)
        elif isinstance(value, bytes):
            media_type, data = self._encoded(value)
            return Media(self.kind, media_type, data, detail=self.detail)
        elif isinstance(value, np.ndarray) and self.kind == "image" and value.dtype == np.uint8:
            plain = value[..., 0] if value.ndim == 3 and value.shape[2] == 1 else value
            return Media(self.kind, *self._image(plain), detail=self.detail)
        described = f"a {type(value).__name__}" if value is not None else "a null in a list"
        if isinstance(value, np.ndarray):
            described = f"a tensor of {value.dtype} with shape {value.shape}"
        raise ValueError(f"column {self.column!r} holds {described}; expected {self.expected}")

    def _encoded(self, data: bytes) -> tuple[str, bytes]:
        """Return the media type and the bytes of a file."""
        if self.kind == "image":
            return self._image(data)
        for media_type, mark in _MARKS[self.kind].items():
            if mark.match(data):
                return media_type, data
        expected = names(_MARKS[self.kind])
        raise ValueError(f"column {self.column!r} holds a file of another type than {expected}")

    def _image(self, value: Any) -> tuple[str, bytes]:
        """Return the media type and the bytes of an image: its own if they can be sent."""
        from PIL import Image

        try:
            image = opened(value) if isinstance(value, bytes) else Image.fromarray(value)
            media_type = _IMAGES.get(image.format or "")
            is_large = self.max_pixels is not None and image.width * image.height > self.max_pixels
            if media_type and not is_large:
                return media_type, value
            return _written(image, media_type, self.max_pixels)
        except Exception as error:  # decoders raise any class
            raise ValueError(f"column {self.column!r}: {first_line(error)}") from error


def _written(image: Any, media_type: str | None, max_pixels: int | None) -> tuple[str, bytes]:
    """Encode an image of at most some pixels: a JPEG file as JPEG, others as PNG."""
    from PIL import Image, ImageOps

    most = max_pixels or image.width * image.height

    def scaled() -> tuple[float, tuple[int, int]]:
        scale = math.sqrt(most / (image.width * image.height))
        return scale, (max(1, int(image.width * scale)), max(1, int(image.height * scale)))

    is_jpeg = media_type == "image/jpeg"
    if scaled()[0] < 1:
        image.draft(None, scaled()[1])  # a JPEG file is decoded at about this size
    image = ImageOps.exif_transpose(image)
    has_alpha = not is_jpeg and ("A" in image.mode or "transparency" in image.info)
    mode = image.mode if image.mode in _MODES else "RGBA" if has_alpha else "RGB"
    image = image if image.mode == mode else converted(image, mode)
    if scaled()[0] < 1:
        image = image.resize(scaled()[1], Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG" if is_jpeg else "PNG", quality=_QUALITY)
    return "image/jpeg" if is_jpeg else "image/png", buffer.getvalue()


@known_keywords("vd.image")
def image(
    column: str,
    *,
    detail: str | None = None,
    max_pixels: int | None = None,
    fetch_by_provider: bool = False,
) -> Content:
    """Return a part of a prompt: the image in a column, or the images in a column of lists.

    A value is an encoded file (bytes), a uint8 tensor of shape ``(height, width)`` or ``(height,
    width, channels)``, or the path of a file that the pipeline's source lists, as `vd.files` does.
    Files in the formats JPEG, PNG, GIF and WebP are sent as they are; those in other formats, and
    tensors, as PNG. A value that is null, or no image, is an error of its row.

    Args:
        column: The column.
        detail: How closely a model of OpenAI's API looks at the image, such as "low" or "high".
        max_pixels: Maximum pixels of an image. Larger images are scaled down before they are sent:
            JPEG files to JPEG, others to PNG, with their EXIF orientation applied. Regardless of
            this value, a file of more than 89,478,485 pixels is an error of its row, to protect
            against decompression bombs.
        fetch_by_provider: Whether the column holds http:// or https:// URLs, which the model's
            server fetches. Row keys include the URL, but not the content at this URL.

    Raises:
        DefinitionError: If an argument is invalid, or Pillow is missing.

    Example:
        docs.prompt("caption", ["What is on the picture?", vd.image("picture", max_pixels=500_000)])
    """
    text("vd.image", "column", column, "a name")
    if detail is not None:
        text("vd.image", "detail", detail, 'a text, such as "low"')
    positive("vd.image", "max_pixels", max_pixels)
    if not flag("vd.image", "fetch_by_provider", fetch_by_provider):
        check_installed("vd.image", "PIL", "images")
    elif max_pixels is not None:
        raise DefinitionError(
            "vd.image: max_pixels cannot be kept with fetch_by_provider: the worker never has the "
            "image. Leave one of them out"
        )
    return Content("image", column, detail, max_pixels, fetch_by_provider)


@known_keywords("vd.audio")
def audio(column: str) -> Content:
    """Return a part of a prompt: the sound in a column, or the sounds in a column of lists.

    A value is a WAV, MP3, FLAC, Ogg or MP4 file (bytes), or the path of a file that the pipeline's
    source lists, as `vd.files` does. It is sent as it is; which of these formats a model reads is
    its own. A value that is null, or no such file, is an error of its row.

    Args:
        column: The column.

    Raises:
        DefinitionError: If it is not a name.
    """
    return Content("audio", text("vd.audio", "column", column, "a name"))


@known_keywords("vd.document")
def document(column: str, *, fetch_by_provider: bool = False) -> Content:
    """Return a part of a prompt: the PDF file in a column, or the files in a column of lists.

    A value is the file's bytes, or the path of a file that the pipeline's source lists, as
    `vd.files` does. A value that is null, or no PDF, is an error of its row.

    Args:
        column: The column.
        fetch_by_provider: See `image`.

    Raises:
        DefinitionError: If an argument is invalid.
    """
    text("vd.document", "column", column, "a name")
    flag("vd.document", "fetch_by_provider", fetch_by_provider)
    return Content("document", column, fetch_by_provider=fetch_by_provider)
