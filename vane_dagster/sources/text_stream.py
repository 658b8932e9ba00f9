"""`TextStream`: a file's text as UTF-8, decompressed by its suffix, in blocks of bytes."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from vane_dagster.errors import DefinitionError, SourceError
from vane_dagster.sources.base import unreadable
from vane_dagster.storage.damage import is_damage
from vane_dagster.storage.filesystem import Location

BLOCK = 8 << 20
"""Bytes of one request to the file system."""
UTF_8 = "utf-8"
MAX_LINE = 256 << 20
"""Maximum bytes of a line."""

_COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_UNPACKERS: Mapping[str, Callable[[Any], Any]] = {
    "gzip": lambda packed: gzip.GzipFile(fileobj=packed),
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zstd": lambda packed: pa.CompressedInputStream(packed, "zstd"),
}
_MAGIC = {
    b"\x1f\x8b": "gzip-compressed data; rename it to end in .gz",
    b"\x28\xb5\x2f\xfd": "zstd-compressed data; rename it to end in .zst",
    b"BZh": "bzip2-compressed data; rename it to end in .bz2",
    b"PAR1": "Parquet; read it by vd.parquet",
    b"PK\x03\x04": "a zip archive; unpack it",
    codecs.BOM_UTF16_LE: 'UTF-16; set encoding="utf-16"',
    codecs.BOM_UTF16_BE: 'UTF-16; set encoding="utf-16"',
}
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


def with_compressed(*suffixes: str) -> tuple[str, ...]:
    """Return suffixes of file names, each plain and with those of compressed files."""
    return tuple(each + more for each in suffixes for more in ("", *_COMPRESSIONS))


def parse_encoding(where: str, encoding: Any) -> str:
    """Return the normalized name of an encoding.

    Args:
        where: The argument, for the message.
        encoding: A name that Python knows.

    Raises:
        DefinitionError: If Python does not know it.
    """
    try:
        return codecs.lookup(encoding).name
    except (LookupError, TypeError):
        raise DefinitionError(
            f"{where}: encoding is {encoding!r}; expected the name of a text encoding of Python, "
            "such as 'utf-8', 'latin-1' or 'utf-16'"
        ) from None


class RowTooLongError(Exception):
    """A row does not fit into the window of the file."""


@dataclass(frozen=True)
class TextStream:
    """The text of a file, without a byte order mark.

    Attributes:
        url: The file.
        encoding: The encoding of the file.
        location: The pipeline, for messages.
        storage_options: Options of the fsspec file system.
        window: Bytes that are parsed at a time, if a row has to fit into them.
    """

    url: str
    encoding: str
    location: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    window: int = 4 << 20

    @property
    def compression(self) -> str | None:
        """The file's compression, by its suffix."""
        return next((_COMPRESSIONS[s] for s in _COMPRESSIONS if self.url.endswith(s)), None)

    def blocks(self) -> Iterator[bytes]:
        """Read the text in UTF-8, in blocks of at most about `BLOCK` bytes.

        Raises:
            SourceError: If the file cannot be read, decompressed or decoded.
        """
        try:
            with self.opened() as stream:
                for number, block in enumerate(self._decoded(self._checked(_read(stream)))):
                    yield block.removeprefix(codecs.BOM_UTF8) if number == 0 else block
        except SourceError:
            raise
        except UnicodeDecodeError as error:
            raise self.refused(
                f"it is not valid {self.encoding}. Set encoding= to the file's encoding, or write "
                "it again as UTF-8"
            ) from error
        except Exception as error:  # drivers and decompressors raise their own exception classes
            if self.compression and (isinstance(error, _DAMAGE) or is_damage(error)):
                raise self.refused(
                    f"it cannot be decompressed as {self.compression}: it is truncated or "
                    "damaged. Write it again, or take it out of the source"
                ) from error
            raise unreadable(self.url, error, self.location) from error

    def refused(self, reason: str, line: int | None = None) -> SourceError:
        """Return an error about the file.

        Args:
            reason: What is wrong, and the fix; no data.
            line: The line, counted from 1.
        """
        where = f", line {line}" if line is not None else ""
        return SourceError(f"{self.location}: {self.url!r}{where}: {reason}")

    def not_utf_8(self, block: bytes, first: int) -> SourceError:
        """Return the error for text that is not valid UTF-8.

        Args:
            block: The text.
            first: The number of its first line.
        """
        try:
            block.decode()
            line = None
        except UnicodeDecodeError as error:
            line = first + block.count(b"\n", 0, error.start)
        return self.refused(
            'it is not valid UTF-8. Set encoding= to the encoding of the file, as "latin-1"',
            line=line,
        )

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Open the file for reading of its decompressed bytes."""
        location = Location(self.url, self.storage_options)
        with ExitStack() as opened:
            raw: Any
            if location.is_local:
                raw = opened.enter_context(io.FileIO(location.path))
            else:
                raw = opened.enter_context(location.fs.open(location.path, cache_type="none"))
            if self.compression is None:
                yield raw
                return
            buffered = opened.enter_context(io.BufferedReader(raw, BLOCK))
            yield opened.enter_context(_UNPACKERS[self.compression](buffered))

    def _checked(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the blocks; refuse a file whose first bytes are those of another format."""
        for number, block in enumerate(blocks):
            for magic, found in _MAGIC.items() if number == 0 else ():
                is_wide = magic in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
                if block.startswith(magic) and not (is_wide and self.encoding != UTF_8):
                    raise self.refused(
                        f"it is {found}; expected text in {self.encoding}, or take the file out "
                        "of the source"
                    )
            yield block

    def _decoded(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        if self.encoding == UTF_8:
            yield from blocks
            return
        decoder = codecs.getincrementaldecoder(self.encoding)()
        for block in blocks:
            yield decoder.decode(block).encode(UTF_8)
        yield decoder.decode(b"", final=True).encode(UTF_8)


class BlockReader(io.RawIOBase):
    """A file object over blocks of bytes, for readers that want one."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._held, self._at = b"", 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Return up to a number of bytes; none at the end.

        They do not end between CR and LF: Arrow's reader takes an LF at the beginning of a block
        for the rest of a line end, also in quotes.
        """
        while self._held[self._at :] in (b"", b"\r"):
            block = next(self._blocks, None)
            if block is None:
                break
            self._held, self._at = self._held[self._at :] + block, 0
        start, stop = self._at, min(self._at + max(2, size or 0), len(self._held))
        if stop - start > 1 and self._held[stop - 1] == 13:  # CR
            stop -= 1
        self._at = stop
        return self._held[start:stop]


def is_utf_8(text: bytes) -> bool:
    """Return whether bytes are valid UTF-8."""
    try:
        pa.array([text], pa.large_binary()).cast(pa.large_string())
    except pa.ArrowInvalid:
        return False
    return True


def whole_lines(blocks: Iterable[bytes], stream: TextStream) -> Iterator[bytes]:
    """Join and cut blocks so that each ends after a newline, except for the last.

    Raises:
        SourceError: If a line has more than `MAX_LINE` bytes.
    """
    held: list[bytes] = []
    for block in blocks:
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*held, block[:end]])
            held = []
        held.append(block[end:])
        if sum(map(len, held)) > MAX_LINE:
            raise stream.refused(
                f"a line has more than {MAX_LINE >> 20} MiB. Check that it has newlines"
            )
    if rest := b"".join(held):
        yield rest


def _read(stream: Any) -> Iterator[bytes]:
    while block := stream.read(BLOCK):
        yield block
