"""Writer of ordinary assets in the format of a stage: as parts and a manifest.

A part's name has the digest of its rows and their place, so unchanged rows keep their files from
one materialization to the next.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from vane_dagster.errors import StoreError
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.manifest import FIRST_GENERATION, Manifest, PartInfo
from vane_dagster.storage.part_file import PartTarget, write_part
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.reader import ASSETS, asset_folder
from vane_dagster.storage.store import Store

_MAX_ROWS = 131_072
_MAX_BYTES = 64 << 20
_BLOCK = 256  # rows between two checks of the size in bytes


def write_asset(
    store: Store,
    path: Sequence[str],
    run_id: str,
    partition: str | None,
    rows: pa.RecordBatchReader,
) -> tuple[Manifest, str]:
    """Write rows as they arrive, and commit a manifest when all are written."""
    store.mark()
    stage = asset_folder(path)
    folder = store.parts(ASSETS, stage, partition)
    condemned = store.condemned(ASSETS, stage)
    key = hashlib.sha256("/".join(path).encode()).hexdigest()[:40]
    parts: list[PartInfo] = []
    for table in _pieces(rows):
        target = PartTarget(folder, key, None, salt=str(len(parts)))  # pieces may be equal
        try:
            part = write_part(table, target)
        except pa.ArrowException as error:
            raise StoreError(
                f"{'/'.join(path)!r}: rows cannot be stored as Parquet: {error}"
            ) from error
        if f"{partition_folder(partition)}/{part.name}" in condemned:
            part = write_part(table, replace(target, salt=secrets.token_hex(8)))
        parts.append(part)
    in_threads(folder.sync, (part.name for part in parts))
    names = "\n".join(part.name for part in parts)
    manifest = Manifest(
        pipeline=ASSETS,
        stage=stage,
        partition=None if partition is None else str(partition),
        generation=FIRST_GENERATION,
        plan=hashlib.blake2b(names.encode(), digest_size=16).hexdigest(),
        definition="",
        schema=rows.schema,
        fragments=(),
        parts=parts,
        files=(),
        upstream={},
        run_id=run_id,
        committed_at=time.time(),
        info={"asset": list(path)},
        kind="asset",
    )
    name = store.commit(manifest)
    return manifest, store.manifests(ASSETS, stage, partition).file_url(str(name))


def _pieces(rows: pa.RecordBatchReader) -> Iterator[pa.Table]:
    """Yield the rows in pieces of bounded size, at least one, independent of input batches."""
    held: list[pa.RecordBatch] = []
    count = size = given = 0
    for batch in rows:
        start = 0
        while start < batch.num_rows:
            block = batch.slice(start, _BLOCK - count % _BLOCK)
            start += block.num_rows
            held.append(block)
            count += block.num_rows
            size += block.nbytes
            if count >= _MAX_ROWS or (size >= _MAX_BYTES and count % _BLOCK == 0):
                yield _whole(held, rows.schema)
                held, count, size, given = [], 0, 0, given + 1
    if held or not given:
        yield _whole(held, rows.schema)


def _whole(held: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """Combine batches into one chunk per column, because chunking changes the file's bytes."""
    return pa.Table.from_batches(held, schema).combine_chunks()
