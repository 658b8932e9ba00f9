"""`CheckContext`: a stage's partition, as `Check.evaluate` sees it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from vane_dagster._keywords import require_columns
from vane_dagster._lazy import pc
from vane_dagster.checks.context import (
    ColumnStatistics,
    PackageVersions,
    PartCounts,
    Recomputation,
)
from vane_dagster.storage.column_stats import Measures, measure, merge_measures
from vane_dagster.storage.manifest import Manifest, PartInfo
from vane_dagster.storage.packages import version_of
from vane_dagster.storage.packed_tensors import schema_of_file, unpacked
from vane_dagster.types.sql import unused
from vane_dagster.types.tensors import unsliced

if TYPE_CHECKING:
    import pyarrow.dataset as ds

    from vane_dagster.checks.versions import Diff

_FRAGMENTS = 64
_BATCH = 8192


@dataclass(frozen=True)
class CheckContext:
    """A stage's partition, as `Check.evaluate` sees it.

    Counts and statistics were recorded when the rows were written, so reading them is free. The
    methods that return rows read the store.

    Attributes:
        id: The column that identifies a row.
        schema: The schema of the rows.
        _manifest: The partition's manifest, with or without results of checks.
        _dataset: Opens its rows; called each time a check reads rows.
        _first_faults: Describes the first of its failed rows, at most a number of them.
        _previous: Finds the stage's previous partition.
        _compare: Compares it with another version, for `Compared`: see its `with_`, `columns` and
            `tolerance`; None if the other version lacks the partition.
        _run_id: The current run; empty outside of one.
        _recomputation: Recomputed rows, for `Reproducible`.
    """

    id: str
    schema: pa.Schema
    _manifest: Manifest
    _dataset: Callable[[], ds.Dataset]
    _first_faults: Callable[[int], Sequence[str]] = lambda limit: ()
    _previous: Callable[[], CheckContext | None] = lambda: None
    _compare: Callable[..., Diff | None] = lambda *given: None
    _run_id: str = ""
    _recomputation: Recomputation | None = None

    @property
    def partition(self) -> str | None:
        """The partition's key; None in an unpartitioned pipeline."""
        return self._manifest.partition

    @property
    def keys(self) -> Sequence[str]:
        """The key columns: the id, then the ids of the rows that a row was made from."""
        return tuple(dict.fromkeys((self.id, *self._manifest.keys)))

    @property
    def fan_out(self) -> bool:
        """Whether the stage makes several rows from one."""
        return bool(self._manifest.info.get("children"))

    @functools.cached_property
    def counts(self) -> PartCounts:
        """The row and error counts of the partition."""
        return PartCounts.total(self.parts)

    @functools.cached_property
    def parts(self) -> Sequence[PartCounts]:
        """The row and error counts of each part."""
        names = [each.name for each in fields(PartCounts)]
        parts = self._manifest.parts
        return [PartCounts(**{name: getattr(part, name) for name in names}) for part in parts]

    @property
    def packages(self) -> Sequence[PackageVersions]:
        """The packages that the stage's code imports."""
        return _package_versions(self._manifest.parts, self._run_id)

    def first_failures(self, limit: int) -> Sequence[str]:
        """Describe the first rows that failed: the id, and the class and message of the error.

        Args:
            limit: The maximum number of rows.
        """
        return self._first_faults(limit)

    def statistics(self, columns: Sequence[str]) -> Mapping[str, ColumnStatistics]:
        """Return the statistics of columns.

        Raises:
            SchemaError: If a column does not exist.
        """
        require_columns("the stage", columns, self.schema.names)
        measures = self._measured(columns)
        counted = [each.name for each in fields(ColumnStatistics)]
        return {
            name: ColumnStatistics(**{n: int(v) for n, v in counts.items() if n in counted})
            for name, counts in ((name, measures.get(name, {})) for name in columns)
        }

    def _measured(self, columns: Sequence[str]) -> Measures:
        """Measures of the columns; computed now for parts that were written without them."""
        parts = [part for part in self._manifest.parts if part.rows]
        if all(name in part.measures for part in parts for name in columns):
            return merge_measures({name: part.measures[name] for name in columns} for part in parts)
        batches = map(pa.Table.from_batches, ([batch] for batch in self.batches(columns)))
        return merge_measures(measure(batch, columns) for batch in batches)

    def batches(
        self, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows, a few thousand at a time.

        Args:
            columns: The columns to read. Default: all.
            where: A filter expression of `pyarrow.compute`, such as ``pc.field("score") > 1``.

        Raises:
            SchemaError: If a column does not exist.
        """
        wanted = self.schema.names if columns is None else columns
        require_columns("the stage", wanted, self.schema.names)
        dataset = self._dataset()
        return (
            batch
            for fragment in dataset.get_fragments()
            for batch in _batches(fragment, dataset.schema, wanted, where)
        )

    def sample(self, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Read rows chosen at random from the whole partition; each call returns the same rows.

        Args:
            columns: The columns to read.
            rows: The maximum number of rows.

        Raises:
            SchemaError: If a column does not exist.
        """
        require_columns("the stage", columns, self.schema.names)
        return sample(self._dataset(), columns, rows)

    def lookup(self, ids: pa.Array, columns: Sequence[str]) -> pa.Table:
        """Read the rows with the given ids.

        Args:
            ids: The ids, of the id column's type.
            columns: The columns to read besides the id.

        Returns:
            The id and the columns, in the order of the partition, without missing ids.

        Raises:
            SchemaError: If a column does not exist.
        """
        wanted = list(dict.fromkeys((self.id, *columns)))
        batches = self.batches(wanted, pc.field(self.id).isin(ids))
        return pa.Table.from_batches(batches, pa.schema([self.schema.field(n) for n in wanted]))

    def previous(self) -> CheckContext | None:
        """Return the nearest earlier partition that was materialized; None if there is none.

        Raises:
            DefinitionError: If the check does not set `Check.compares`.
        """
        return self._previous()


def _package_versions(parts: Sequence[PartInfo], run_id: str) -> list[PackageVersions]:
    """The packages that parts were computed with, and their current versions.

    Current versions are those of the run's workers, according to its own parts; without such parts,
    those installed here.
    """
    workers = _versions(part for part in parts if part.made and part.made.run_id == run_id)
    packages = []
    for name, recorded in _versions(parts).items():
        here = version_of(name)
        current = workers.get(name) or ([here] if here else [])
        packages.append(PackageVersions(name, recorded, current))
    return packages


def _versions(parts: Iterable[PartInfo]) -> Mapping[str, list[str]]:
    """The packages that parts were computed with, each with all its versions."""
    versions: dict[str, list[str]] = {}
    for text in sorted({text for part in parts if part.made for text in part.made.packages}):
        name, _, version = text.partition("==")
        versions.setdefault(name, []).append(version)
    return versions


def sample(dataset: ds.Dataset, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
    """Rows chosen at random with a fixed seed, batch by batch.

    They are spread over the whole dataset; at most 64 of its fragments are opened.
    """
    fragments = list(dataset.get_fragments())
    if len(fragments) > _FRAGMENTS:
        spread = np.linspace(0, len(fragments) - 1, _FRAGMENTS).round().astype(int)
        fragments = [fragments[i] for i in spread]
    total = sum(fragment.count_rows() for fragment in fragments)
    chosen = np.full(total, total <= rows)
    if total > rows:
        chosen[np.random.default_rng(0).choice(total, rows, replace=False, shuffle=False)] = True
    start = 0
    for fragment in fragments:
        for batch in _batches(fragment, dataset.schema, columns):
            yield batch.take(np.flatnonzero(chosen[start : start + len(batch)]))
            start += len(batch)


def _batches(
    fragment: ds.Fragment, schema: pa.Schema, columns: Sequence[str], where: Any = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a fragment in small batches."""
    import pyarrow.dataset as ds  # imports pandas if installed

    selected: dict[str, Any] = {name: pc.field(name) for name in columns}
    options = {}
    if where is not None:  # applied here, because a scanner selects from slices: see `unsliced`
        selected[passes := unused("passes", columns)] = where
    if isinstance(fragment, ds.ParquetFileFragment):
        if where is not None:
            fragment = fragment.subset(where, schema=schema)
        scan = ds.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
        options["fragment_scan_options"] = scan
    scanner = fragment.scanner(
        schema=schema_of_file(schema, fragment.physical_schema),
        columns=selected,
        batch_size=_BATCH,
        batch_readahead=1,
        fragment_readahead=1,
        **options,
    )
    for batch in scanner.to_batches():
        rows = unsliced(unpacked(pa.Table.from_batches([batch]), schema))
        if where is not None:
            rows = rows.filter(rows.column(passes)).drop_columns([passes])
        yield from rows.to_batches()
