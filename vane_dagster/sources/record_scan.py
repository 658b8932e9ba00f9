"""A scan of text for the ends of records: it counts rows, and cuts a file at record boundaries.

Each kind of record is a finder, which gets chunks of whole lines in order. The scan is vectorized
over the bytes of a chunk, and does not parse values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vane_dagster.sources.base import FragmentRule
from vane_dagster.sources.text_stream import whole_lines

Positions = npt.NDArray[np.int64]

_LF, _CR = ord("\n"), ord("\r")
_SPACES = np.frombuffer(b" \t\r\n", np.uint8)


class RecordFinder(Protocol):
    """Finds the ends of records in successive chunks of whole lines.

    Attributes:
        is_regular: Whether all ends so far are certain. If not, later ones have no meaning.
    """

    is_regular: bool

    def ends(self, chunk: bytes, line_ends: Positions) -> Positions:
        """Return the positions after the records that end in a chunk, in ascending order.

        Args:
            chunk: The next lines.
            line_ends: The positions after its lines.
        """

    def finish(self) -> None:
        """Note that there are no more chunks."""


class LineFinder:
    """Every line is a record."""

    is_regular = True

    def ends(self, chunk: bytes, line_ends: Positions) -> Positions:
        return line_ends

    def finish(self) -> None:
        """Accept any end."""


class FilledLineFinder(LineFinder):
    """Every line that has more than white space is a record."""

    def ends(self, chunk: bytes, line_ends: Positions) -> Positions:
        starts = np.concatenate(([0], line_ends[:-1]))
        letters = np.frombuffer(chunk, np.uint8)
        maybe = np.flatnonzero(np.isin(letters[starts], _SPACES))
        if not maybe.size:
            return line_ends
        blank = [i for i in maybe if not chunk[starts[i] : line_ends[i]].strip(b" \t\r\n")]
        return np.delete(line_ends, blank)


class QuotedFinder:
    """Records whose fields may have newlines in quotes, with a doubled quote for a quote.

    The number of quotes before a newline tells whether it is in quotes, provided that each quote
    opens a field, closes one, or is doubled. A file where this does not hold, or with a CR that is
    neither in quotes nor before LF, is irregular.

    Attributes:
        has_crlf: Whether some record ends in CRLF.
        is_open: Whether the text ended in quotes.
    """

    def __init__(self, delimiter: str, quote: str, skips_blank: bool) -> None:
        self._delimiter = ord(delimiter)
        self._quote = ord(quote) if quote else None
        self._skips_blank = skips_blank
        self._is_quoted = 0
        self.is_regular = True
        self.is_open = False
        self.has_crlf = False

    def ends(self, chunk: bytes, line_ends: Positions) -> Positions:
        letters = np.frombuffer(chunk, np.uint8)
        inside = self._is_quoted
        quotes = (
            np.flatnonzero(letters == self._quote) if self._quote is not None else line_ends[:0]
        )
        found = line_ends
        if quotes.size or inside:
            self.is_regular &= self._are_regular(chunk, quotes)
            found = line_ends[(np.searchsorted(quotes, line_ends) + inside) % 2 == 0]
            self._is_quoted = (inside + quotes.size) % 2
        newlines = found if chunk.endswith(b"\n") else found[found < len(chunk)]
        returns = np.flatnonzero(letters == _CR)
        returns = returns[(np.searchsorted(quotes, returns) + inside) % 2 == 0]
        self.has_crlf |= bool(returns.size)
        self.is_regular &= bool(np.isin(returns + 2, newlines).all())
        if self._skips_blank and found.size:
            held = np.diff(found, prepend=-1 if inside else 0)
            held[: newlines.size] -= 1 + np.isin(newlines, returns + 2)
            found = found[held > 0]
        return found

    def finish(self) -> None:
        """Note the end of the file; it must not be in quotes."""
        self.is_open = self.is_regular and bool(self._is_quoted)
        self.is_regular &= not self.is_open

    def _are_regular(self, chunk: bytes, quotes: Positions) -> bool:
        """Return whether each quote opens or closes a field, or is doubled."""
        padded = np.frombuffer(b"\n" + chunk + b"\n", np.uint8)
        follows = np.diff(quotes, prepend=-2) == 1
        precedes = np.append(follows[1:], False)
        opens = (np.arange(quotes.size) + self._is_quoted) % 2 == 0
        before, after = padded[quotes], padded[quotes + 2]
        starts = follows | (before == self._delimiter) | (before == _LF)
        closes = precedes | (after == self._delimiter) | (after == _LF) | (after == _CR)
        return bool(np.where(opens, starts, closes).all())


def unix_newlines(blocks: Iterable[bytes], quote: str) -> Iterator[bytes]:
    """Replace CRLF by LF outside of quotes. The records must be regular.

    Args:
        blocks: The text, from the start of a record.
        quote: The quote; empty for none.
    """
    is_quoted = 0
    for chunk in whole_lines(blocks):
        if not (is_quoted or (quote and quote.encode() in chunk)):
            yield chunk.replace(b"\r\n", b"\n")
            continue
        letters = np.frombuffer(chunk, np.uint8)
        quotes = np.flatnonzero(letters == ord(quote))
        returns = np.flatnonzero(letters == _CR)
        outside = (np.searchsorted(quotes, returns) + is_quoted) % 2 == 0
        yield np.delete(letters, returns[outside]).tobytes()
        is_quoted = (is_quoted + quotes.size) % 2


@dataclass(frozen=True)
class Cut:
    """A boundary between records: the rows, bytes and lines before it."""

    row: int
    byte: int
    line: int


@dataclass(frozen=True)
class Records:
    """The result of a scan.

    Attributes:
        cuts: The cuts, from the start of the first fragment to the end of the last. Without rows
            there is one.
        is_regular: Whether the counts are certain.
        end: The cut after the last record that is certain.
        longest: Bytes of the longest record.
    """

    cuts: tuple[Cut, ...]
    is_regular: bool
    end: Cut
    longest: int


def scan(
    blocks: Iterable[bytes], finder: RecordFinder, rule: FragmentRule | None, start: Cut
) -> Records:
    """Count and cut the records of a text.

    Args:
        blocks: The text.
        finder: Finds the records.
        rule: The maximum size of a fragment; None to make one of all.
        start: The position where the text begins, with the lines before it.

    Raises:
        ValueError: If a line is too long.
    """
    cuts = [start]
    at, lines, rows, longest = start.byte, start.line, 0, 0
    last = start
    for chunk in whole_lines(blocks):
        line_ends = ends_of_lines(chunk) + at
        ends = finder.ends(chunk, line_ends - at) + at if finder.is_regular else line_ends[:0]
        if ends.size:
            longest = max(longest, int(np.diff(ends, prepend=last.byte).max()))

        while rule is not None:
            first = cuts[-1]
            most = first.row + rule.rows - rows
            most = min(most, int(np.searchsorted(ends, first.byte + rule.bytes, "right")))
            most = max(most, first.row + 1 - rows)
            if most >= ends.size:
                break
            cuts.append(_cut(most, ends, line_ends, last, lines))
        last = _cut(ends.size, ends, line_ends, last, lines)
        rows, at, lines = last.row, at + len(chunk), lines + line_ends.size
    finder.finish()
    if rows > cuts[-1].row:
        cuts.append(Cut(rows, at, lines))
    return Records(tuple(cuts), finder.is_regular, last, longest)


def _cut(index: int, ends: Positions, line_ends: Positions, last: Cut, lines: int) -> Cut:
    """Return the cut after a number of a chunk's records.

    Args:
        index: The number of records.
        ends: The positions after the records of the chunk.
        line_ends: The positions after its lines.
        last: The cut before its first record.
        lines: The lines before the chunk.
    """
    if not index:
        return last
    end = int(ends[index - 1])
    return Cut(last.row + index, end, lines + int(np.searchsorted(line_ends, end, "right")))


def ends_of_lines(chunk: bytes) -> Positions:
    """Return the positions after the lines of a text."""
    ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _LF) + 1
    return ends if chunk.endswith(b"\n") or not chunk else np.append(ends, len(chunk))


def records(blocks: Iterable[bytes], finder: RecordFinder) -> Iterator[tuple[bytes, Positions]]:
    """Yield pieces of whole records, each with the positions after its records.

    Args:
        blocks: The text.
        finder: Finds the records.
    """
    rest = b""
    for chunk in whole_lines(blocks):
        ends = finder.ends(chunk, ends_of_lines(chunk)) + len(rest)
        piece, rest = rest + chunk, b""
        end = int(ends[-1]) if ends.size else 0
        if end:
            yield piece[:end], ends
        rest = piece[end:]
