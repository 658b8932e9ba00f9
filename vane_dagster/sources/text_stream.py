"""`TextStream`: a file's text as UTF-8, decompressed by its suffix, in blocks of bytes."""

from __future__ import annotations

import codecs
import functools
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from vane_dagster.errors import DefinitionError, SourceError
from vane_dagster.sources.base import unreadable
from vane_dagster.storage.damage import is_damage
from vane_dagster.storage.filesystem import StoragePath

BLOCK = 16 << 20
"""Bytes of one request to the file system, and the maximum bytes of a row of CSV."""
UTF_8 = "utf-8"
MAX_LINE = 256 << 20
"""Maximum bytes of a line."""

_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


def with_compressed(*suffixes: str) -> tuple[str, ...]:
    """Return suffixes of file names, each plain and with those of compressed files."""
    return tuple(each + more for each in suffixes for more in ("", *_COMPRESSIONS))


def parse_encoding(where: str, encoding: Any) -> str:
    """Return the normalized name of an encoding."""
    try:
        return codecs.lookup(encoding).name
    except (LookupError, TypeError):
        raise DefinitionError(
            f"{where}: encoding is {encoding!r}; expected the name of a text encoding of Python, "
            "such as 'utf-8', 'latin-1' or 'utf-16'"
        ) from None


@dataclass(frozen=True)
class TextStream:
    """The text of a file, without a byte order mark.

    Attributes:
        url: The file.
        encoding: The encoding of the file.
        location: The pipeline, for messages.
        storage_options: Options of the fsspec file system.
    """

    url: str
    encoding: str
    location: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def blocks(self) -> Iterator[bytes]:
        """Read the text as valid UTF-8, in blocks that hold about `BLOCK` bytes of the file."""
        try:
            with self.opened() as stream:
                decoder = codecs.getincrementaldecoder(self.encoding)()
                read = iter(functools.partial(stream.read, BLOCK), b"")
                for number, block in enumerate(read):
                    if self.encoding != UTF_8:
                        block = decoder.decode(block).encode()
                    elif not block.isascii() or decoder.getstate()[0]:
                        decoder.decode(block)
                    yield block.removeprefix(codecs.BOM_UTF8) if number == 0 else block
                if rest := decoder.decode(b"", True):
                    yield rest.encode()
        except SourceError:
            raise
        except UnicodeError as error:
            raise self.refused(
                f"it is not valid {self.encoding.upper()}. Set encoding= to the file's encoding, "
                "such as 'latin-1' or 'utf-16'; a compressed file has a name that ends in "
                f"{', '.join(_COMPRESSIONS)}, and Parquet is read by vd.parquet"
            ) from error
        except Exception as error:  # drivers and decompressors raise their own exception classes
            fix = "It is truncated or damaged. Write it again" if is_damage(error) else None
            raise unreadable(self.url, error, self.location, fix) from error

    def refused(self, reason: str) -> SourceError:
        """Return an error about the file."""
        return SourceError(f"{self.location}: {self.url!r}: {reason}")

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Open the file for reading of its decompressed bytes."""
        file = StoragePath(self.url, self.storage_options)
        with (
            file.fs.open(file.path, cache_type="none") as raw,
            io.BufferedReader(raw, BLOCK) as buffered,
        ):
            packed = next((_COMPRESSIONS[s] for s in _COMPRESSIONS if self.url.endswith(s)), None)
            yield pa.CompressedInputStream(buffered, packed) if packed else buffered


def whole_lines(blocks: Iterable[bytes], stream: TextStream) -> Iterator[bytes]:
    """Join and cut blocks so that each ends after a newline, except for the last."""
    held: list[bytes] = []
    for block, following in itertools.pairwise(itertools.chain(blocks, [None])):
        assert block is not None
        # The last one is whole: Arrow refuses a row of CSV that is in three blocks.
        end = len(block) if following is None else block.rfind(b"\n") + 1
        if (end or following is None) and (lines := b"".join([*held, block[:end]])):
            yield lines
            held = []
        held.append(block[end:])
        if sum(map(len, held)) > MAX_LINE:
            raise stream.refused(
                f"a line has more than {MAX_LINE >> 20} MiB. Check that it has newlines"
            )


class BlockReader(io.RawIOBase):
    """A file object over blocks of whole lines, for Arrow's reader: each read returns a block.

    Arrow takes an LF at the beginning of a block for the rest of a line end, also in quotes.
    """

    def __init__(self, lines: Iterable[bytes], last: bytes) -> None:
        ended = (each if each.endswith((b"\n", b"\r")) else each + b"\n" for each in lines)
        blocks = enumerate(itertools.chain(ended, [last]))
        # Arrow takes one mark for that of the file, so that one in the first value remains.
        self._blocks = ((b"" if n else codecs.BOM_UTF8) + each for n, each in blocks)

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        return next(self._blocks, b"")
