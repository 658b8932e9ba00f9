"""`ImagesSource`: image files, decoded to tensors by Pillow in I/O workers."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from vane_dagster._arguments import check_installed, one_of, positive, unexpected
from vane_dagster._keywords import known_keywords
from vane_dagster.errors import first_line
from vane_dagster.retries import with_retries
from vane_dagster.sources.base import ROW_ERROR, ROW_ERROR_TYPE, unreadable
from vane_dagster.sources.file_source import Suffix, file_arguments
from vane_dagster.sources.raw_files import PATH, FilesSource, listed_rows
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.types.image_files import MAX_PIXELS, converted, opened
from vane_dagster.types.tensors import from_ndarray, tensor, with_null_rows

_CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "YCbCr": 3, "LAB": 3, "HSV": 3, "RGBA": 4, "CMYK": 4}
_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp")
_SCALED = 2
"""JPEG files are decoded at a reduced scale of at least this multiple of the size wanted."""


@dataclass(frozen=True)
class ImagesSource(FilesSource):
    """Image files that match a URL pattern for each partition, one row a file; see `images`.

    Attributes:
        url: A local path or fsspec URL: a file, a folder or a glob.
        asset: Key of the Dagster asset that writes the files, such as "a/b"; None for none.
        allow_empty: Whether a partition without files is accepted.
        storage_options: Passed to fsspec; never part of a key.
        size: Height and width; None for encoded bytes.
        mode: Pillow's mode of the decoded images.
        max_pixels: The most pixels of an image.
    """

    kind: ClassVar[str] = "image"
    suffix: ClassVar[Suffix] = tuple(s for each in _SUFFIXES for s in (each, each.upper()))
    label: ClassVar[str | None] = "image"
    reads_contents: ClassVar[bool] = True
    size: tuple[int, int] | None = None
    mode: str = "RGB"
    max_pixels: int = MAX_PIXELS

    @property
    def reading(self) -> str:
        return f", images 1 {self.size} {self.mode} {self.max_pixels}"

    @property
    def columns(self) -> pa.Schema:
        fields: list[tuple[str, pa.DataType]] = [(PATH, pa.string())]
        if self.size is None:
            fields += [("image", pa.binary()), ("height", pa.int32()), ("width", pa.int32())]
        else:
            fields.append(("image", tensor("uint8", self._shape)))
        return pa.schema(fields)

    @property
    def _shape(self) -> tuple[int, ...]:
        assert self.size is not None
        channels = _CHANNELS[self.mode]
        return self.size if channels == 1 else (*self.size, channels)

    def row_bytes(self, file: FileRecord) -> int:
        return file.size if self.size is None else int(np.prod(self._shape))

    def read(self, fragment: FragmentRecord, schema: pa.Schema, location: str) -> pa.Table:
        """Read and decode the fragment's files, in threads."""
        paths = listed_rows(fragment.spans).select([PATH])
        if schema.names == [PATH]:
            return paths
        images = in_threads(self._image, fragment.spans)
        first = images[0].error
        if first is not None and not any(image.is_read for image in images):
            raise unreadable(fragment.spans[0].url, first, location)
        columns = {PATH: paths.column(PATH), **self._columns(images)}
        kept = [*schema.names, *([ROW_ERROR] if ROW_ERROR in columns else [])]
        return pa.table({name: columns[name] for name in kept})

    def _image(self, span: FileSpan) -> _Image:
        is_read = False
        try:
            file = StoragePath(span.url, self.options_for(span.url))
            size = int(span.detail.split()[0])  # s3fs asks for it, unless it gets a range
            read = functools.partial(file.fs.cat_file, file.path, start=0, end=size)
            data = bytes(with_retries(read)) if size else b""
            is_read = True
            return _Image(is_read, None, self._decoded(data))
        except Exception as error:  # drivers and decoders raise any class
            return _Image(is_read, error, (None, None, None))

    def _decoded(self, data: bytes) -> tuple[Any, int, int]:
        """Return the image, decoded if it has a size, and the file's own height and width."""
        from PIL import Image

        with opened(data, self.max_pixels) as image:
            size = image.height, image.width
            if self.size is None:
                return data, *size
            height, width = self.size
            image.draft(None, (width * _SCALED, height * _SCALED))
            made = image if image.mode == self.mode else converted(image, self.mode)
            if made.size != (width, height):
                made = made.resize((width, height), Image.Resampling.BILINEAR)
            return np.asarray(made), *size

    def _columns(self, images: Sequence[_Image]) -> dict[str, Any]:
        """Return the columns, with nulls and errors for rows that failed."""
        failed = [image.error is not None for image in images]
        values, *sides = zip(*(image.values for image in images))
        arrays: dict[str, Any]
        if self.size is None:
            columns = zip(self.columns.names[1:], (values, *sides))
            arrays = {name: pa.array(c, self.columns.field(name).type) for name, c in columns}
        else:
            decoded = [value for value in values if value is not None]
            stacked = np.array(decoded, np.uint8).reshape(len(decoded), *self._shape)
            tensors = from_ndarray(stacked, self.columns.field("image").type)
            arrays = {"image": with_null_rows(tensors, failed)}
        errors = [
            None if image.error is None else (type(image.error).__name__, first_line(image.error))
            for image in images
        ]
        if any(failed):
            arrays[ROW_ERROR] = pa.array(errors, ROW_ERROR_TYPE)
        return arrays


class _Image(NamedTuple):
    """What was read of a file.

    Attributes:
        is_read: Whether its bytes could be read.
        error: Why the image could not be read; None if it was.
        values: The image, and its height and width in the file, in pixels.
    """

    is_read: bool
    error: Exception | None
    values: tuple[Any, int | None, int | None]


@known_keywords("vd.images")
def images(
    url: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    mode: str = "RGB",
    max_pixels: int = MAX_PIXELS,
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ImagesSource:
    """Declare image files as a pipeline's source: one row a file, decoded by Pillow.

    With `size`, the rows have the columns ``path`` and ``image``, a uint8 tensor of shape
    ``(height, width, channels)``, ``(height, width)`` for mode "L". Without, ``image`` is the
    encoded file, binary, beside its ``height`` and ``width`` in pixels, int32. The id is ``path``
    unless the pipeline names another. I/O workers decode in parallel, while models compute. Only
    the first frame of an animation is read. Needs the package Pillow where the workers run.

    If a file is not an image, empty, too large or unreadable, the stage that reads it quarantines
    its row. With `size`, this includes truncated files; without it, only the header is read, so
    truncation is not detected. If no file of a fragment can be read at all, the partition fails,
    because the cause is not the files. If no image of a partition can be decoded, the partition
    fails with the first errors.

    Conversion to "RGB" drops transparency, and floats are clipped to 0 to 255. A stage that reads
    only ``path`` decodes nothing.

    Args:
        url: A path or fsspec URL; see `files`. In a folder, the files that end in .jpg, .jpeg,
            .png, .gif, .bmp, .tif, .tiff or .webp are read. A glob may match any.
        size: Height and width in pixels to resize each image to, bilinear. JPEG files more than
            twice as large are decoded at a reduced scale first.
        mode: Pillow's mode, such as "RGB", "RGBA" or "L", and its conversion, except that 16 bits
            are scaled to 8. The EXIF orientation is not applied.
        max_pixels: The most pixels of an image, against decompression bombs.
        asset: The Dagster asset that writes the files: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether a partition without files is accepted; an error by default.
        storage_options: Options of the fsspec file system, such as an S3 endpoint.

    Raises:
        DefinitionError: If an argument is invalid, or Pillow is missing.
    """
    check_installed("vd.images", "PIL", "images")
    whole = (
        isinstance(size, (tuple, list))
        and len(size) == 2
        and all(isinstance(side, (int, np.integer)) and side > 0 for side in size)
    )
    if size is not None and not whole:
        raise unexpected("vd.images", "size", size, "height and width, such as (224, 224)")
    one_of("vd.images", "mode", mode, tuple(_CHANNELS))
    pixels = positive("vd.images", "max_pixels", max_pixels, MAX_PIXELS)
    sides = None if size is None else (int(size[0]), int(size[1]))
    arguments = file_arguments("vd.images", url, asset, storage_options, allow_empty)
    return ImagesSource(*arguments, sides, mode, pixels)
