"""What checks are evaluated on, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from vane_dagster.storage.manifest import Manifest

if TYPE_CHECKING:
    import pyarrow.dataset as ds

_FRAGMENTS = 64
_BATCH = 8192


@dataclass(frozen=True)
class Subject:
    """A stage in a partition.

    Attributes:
        manifest: Its manifest, with or without results of checks.
        id: The column that identifies a row.
        dataset: Opens its rows.
        previous: Names and opens the stage in the previous partition, or returns None.
        run_id: The run that asks; empty outside of one.
    """

    manifest: Manifest
    id: str
    dataset: Callable[[], ds.Dataset]
    previous: Callable[[], tuple[str, ds.Dataset] | None] = lambda: None
    run_id: str = ""


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        passed: Whether it passed.
        description: What was found, in a sentence.
        metadata: Numbers and texts.
    """

    passed: bool
    description: str
    metadata: Mapping[str, Any]


def sample(dataset: ds.Dataset, column: str, rows: int) -> Iterator[pa.Array]:
    """Rows of a column, chosen by chance and the same ones each time, batch by batch.

    They are spread over the whole dataset, of whose fragments at most 64 are opened.

    Args:
        dataset: The rows.
        column: The column that is read.
        rows: How many are taken at most.
    """
    fragments = list(dataset.get_fragments())
    if len(fragments) > _FRAGMENTS:
        spread = np.linspace(0, len(fragments) - 1, _FRAGMENTS).round().astype(int)
        fragments = [fragments[i] for i in spread]
    counts = [fragment.count_rows() for fragment in fragments]
    total = sum(counts)
    chosen = np.arange(total)
    if total > rows:
        chosen = np.random.default_rng(0).choice(total, rows, replace=False, shuffle=False)
        chosen.sort()
    start = 0
    for fragment, count in zip(fragments, counts):
        if np.searchsorted(chosen, start) < np.searchsorted(chosen, start + count):
            for batch in batches(fragment, dataset.schema, [column]):
                low, high = np.searchsorted(chosen, [start, start + len(batch)])
                yield batch.column(0).take(pa.array(chosen[low:high] - start))
                start += len(batch)
        else:
            start += count


def batches(
    fragment: ds.Fragment, schema: pa.Schema, columns: Sequence[str], where: Any = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a fragment, few at a time."""
    import pyarrow.dataset as ds  # imports pandas where it is installed

    options = {}
    if isinstance(fragment, ds.ParquetFileFragment):
        scan = ds.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
        options["fragment_scan_options"] = scan
    scanner = fragment.scanner(
        schema=schema,
        columns=list(columns),
        filter=where,
        batch_size=_BATCH,
        batch_readahead=1,
        fragment_readahead=1,
        **options,
    )
    yield from scanner.to_batches()
