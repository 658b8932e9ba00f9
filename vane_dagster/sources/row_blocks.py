"""Division of rows into blocks, and digests of the rows.

Blocks end at multiples of a number of rows; those of large rows are halved until they are small.
So a changed or appended row changes its own block alone. An inserted or deleted one also changes
those after it; their rows are found by row keys.

A digest covers the names and types of columns and the encodings of rows that row keys are made of.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator

import pyarrow as pa

from vane_dagster.storage.row_keys import encoded_rows
from vane_dagster.storage.stored_tables import Piece

BLOCK_ROWS = 1_024
"""The maximum number of rows of a block."""
_BLOCK_BYTES = 8 << 20


def blocks(chunks: Iterable[pa.Table]) -> Iterator[tuple[Piece, pa.Table]]:
    """Divide rows into blocks."""
    seen: Counter[str] = Counter()
    for chunk in chunks:
        for first in range(0, len(chunk), BLOCK_ROWS):
            for rows in _halved(chunk.slice(first, BLOCK_ROWS)):
                types = "".join(f"{len(f.name)} {f.name} {f.type}\n" for f in rows.schema)
                content = encoded_rows(rows.columns).buffers()[2]
                state = hashlib.sha256(f"{types}{len(rows)}\n".encode())
                state.update(content)
                digest = state.hexdigest()[:40]
                count = seen[digest]
                seen[digest] += 1
                identity = f"{digest}~{count}" if count else digest
                yield Piece(identity, len(rows), content.size, ()), rows


def _halved(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield parts of rows that are small enough."""
    half = len(rows) // 2
    if half and rows.nbytes > _BLOCK_BYTES:
        yield from _halved(rows.slice(0, half))
        yield from _halved(rows.slice(half))
    else:
        yield rows
