"""Checks that users add: against the previous partition, and against expected outputs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Union

import pyarrow as pa
import pyarrow.parquet as pq

from vane_dagster._arguments import mapping, positive
from vane_dagster._secrets import keep_options, revealed, url_parts, with_options
from vane_dagster.checks.base import Check, Severity, bound, checked_columns
from vane_dagster.errors import DefinitionError, names
from vane_dagster.types.kinds import is_floats, is_number, is_text
from vane_dagster.types.url_pattern import check_url

Expected = Union[str, "os.PathLike[str]", pa.Table, Mapping[str, Any]]


def can_drift(kind: pa.DataType) -> bool:
    """Whether `Drift` takes a column of the type."""
    return is_number(kind) or is_text(kind) or is_floats(kind) or pa.types.is_boolean(kind)


@dataclass(frozen=True)
class Drift(Check):
    """How far a column's distribution has moved since the previous partition.

    Numbers, texts and booleans are compared by the population stability index, where 0.1 is
    commonly read as a slight move and 0.2 as one to look at; vectors by the cosine distance of
    their centroids. Rows are sampled from both partitions.

    Attributes:
        column: The column.
        max_psi: The largest population stability index.
        max_distance: The largest cosine distance, from 0 to 2.
        bins: Bins of equal share in the previous partition for numbers, or its most frequent values
            for texts; the rest is a bin, and so are nulls.
        sample_rows: Rows that are read of each partition at most.
        min_rows: With fewer rows in either partition it passes: chance alone moves the index by
            about ``2 * bins / rows``.
    """

    kind: ClassVar[str] = "drift"
    thresholds: ClassVar[Mapping[str, str]] = {
        "column": "column",
        "max_psi": "max_psi",
        "max_distance": "max_distance",
        "bins": "bins",
        "sample_rows": "sample_rows",
        "min_rows": "min_rows",
    }

    column: str
    max_psi: float = field(default=0.2, kw_only=True)
    max_distance: float = field(default=0.1, kw_only=True)
    bins: int = field(default=10, kw_only=True)
    sample_rows: int = field(default=100_000, kw_only=True)
    min_rows: int = field(default=500, kw_only=True)
    name: str = field(default="", kw_only=True)
    severity: Severity = field(default="WARN", kw_only=True)

    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.column, str) or not self.column:
            raise DefinitionError(f"{self._culprit}: column is {self.column!r}; expected its name")
        if not self.name:
            plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in self.column)
            self._set(name=f"drift_{plain}")
        super().__post_init__()
        for each in ("max_psi", "max_distance"):
            self._set(**{each: bound(self._culprit, each, getattr(self, each))})
        for each in ("bins", "sample_rows", "min_rows"):
            positive(self._culprit, each, getattr(self, each))
        if self.bins < 2:
            raise DefinitionError(f"{self._culprit}: bins is 1; expected 2 or more")
        if self.sample_rows < self.min_rows:
            raise DefinitionError(
                f"{self._culprit}: sample_rows is {self.sample_rows}, less than min_rows, "
                f"{self.min_rows}, so that it would always pass; raise it"
            )

    @property
    def description(self) -> str:
        return (
            f"The distribution of {self.column} is close to the previous partition's: a population "
            f"stability index of at most {self.max_psi:g} or, for vectors, a cosine distance "
            f"between the centroids of at most {self.max_distance:g}"
        )

    def fit(self, schema: pa.Schema, culprit: str) -> None:
        kinds = "numbers, texts, booleans or lists of floating-point numbers"
        self._require(schema, culprit, [self.column], can_drift, kinds)


@dataclass(frozen=True)
class Golden(Check):
    """Expected outputs of some rows.

    Numbers and lists of numbers may differ by `tolerance`, all else has to be equal.

    Attributes:
        expected: The path or URL of a Parquet file, a `pyarrow.Table`, or lists by column: the id
            and the columns that are expected. A file is read when the check is evaluated.
        columns: The columns that are compared; by default all of them.
        tolerance: The largest difference, as it is or as a share of the expected number.
        max_distance: The largest cosine distance of vectors, which then stands in place of the
            tolerance for them.
        min_found: How many of the ids have to be in a partition. By default one that has none of
            them passes.
        storage_options: Options of the fsspec file system of a URL; not part of the definition.
    """

    kind: ClassVar[str] = "golden"
    thresholds: ClassVar[Mapping[str, str]] = {
        "expected": "expected",
        "columns": "columns",
        "tolerance": "tolerance",
        "max_distance": "max_distance",
        "min_found": "min_found",
        "storage_options": "storage_options",
    }

    expected: Expected = field(hash=False)
    columns: Sequence[str] | None = field(default=None, kw_only=True)
    tolerance: float = field(default=1e-6, kw_only=True)
    max_distance: float | None = field(default=None, kw_only=True)
    min_found: int = field(default=0, kw_only=True)
    storage_options: Mapping[str, Any] | None = field(
        default=None, kw_only=True, repr=False, hash=False, compare=False
    )
    name: str = field(default="golden", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(
            columns=checked_columns(self._culprit, self.columns),
            tolerance=bound(self._culprit, "tolerance", self.tolerance),
            storage_options=mapping(self._culprit, "storage_options", self.storage_options),
            expected=self._parsed(),
        )
        if isinstance(self.expected, str):
            url, found = url_parts(self.expected)
            self._set(expected=url, storage_options=with_options(found, self.storage_options))
        if self.max_distance is not None:
            distance = bound(self._culprit, "max_distance", self.max_distance)
            self._set(max_distance=distance)
        if type(self.min_found) is not int or self.min_found < 0:
            raise DefinitionError(
                f"{self._culprit}: min_found is {self.min_found!r}; expected a number from 0 up"
            )
        if isinstance(self.expected, pa.Table):
            self._require(self.expected.schema, f"{self._culprit}: expected", self.columns)

    @property
    def definitions(self) -> tuple[str, ...]:
        """Digests of the thresholds and of the expected rows; reads the file."""
        rows = hashlib.blake2b(_serialized(self.opened().rows), digest_size=16)
        return self._digests(expected=rows.hexdigest(), storage_options=None)

    @property
    def rows(self) -> pa.Table:
        """The expected rows, of a check that is opened."""
        if not isinstance(self.expected, pa.Table):
            raise TypeError(f"{self._culprit}: {self.expected!r} has not been read")
        return self.expected

    def opened(self) -> Golden:
        """The check with its file read, which can change between two evaluations.

        Raises:
            OSError: If there is no such file.
            DefinitionError: If it has no rows, or lacks a column.
        """
        if isinstance(self.expected, pa.Table):
            return self
        import fsspec

        keep_options(self.storage_options or {})
        with fsspec.open(self.expected, "rb", **revealed(self.storage_options or {})) as file:
            content = file.read()
        return replace(self, expected=pq.read_table(pa.BufferReader(content)))

    @property
    def description(self) -> str:
        return f"Rows with known ids match the expected values within {self.tolerance:g}"

    def fit(self, schema: pa.Schema, culprit: str) -> None:
        self._require(schema, culprit, self.columns)
        if isinstance(self.expected, pa.Table) and self.columns is None:
            self._require(schema, culprit, self.expected.column_names)

    def _parsed(self) -> str | pa.Table:
        if isinstance(self.expected, (str, os.PathLike)):
            url = os.fspath(self.expected)
            check_url(self._culprit, url)
            return url
        if isinstance(self.expected, pa.Table):
            table = self.expected
        elif isinstance(self.expected, Mapping):
            try:
                table = pa.table({name: _plain(value) for name, value in self.expected.items()})
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise DefinitionError(
                    f"{self._culprit}: expected is no table ({error}); give lists of one length by "
                    'column, as {"id": [1, 2], "label": ["a", "b"]}'
                ) from None
        else:
            raise DefinitionError(
                f"{self._culprit}: expected is a {type(self.expected).__name__}; give a path, a "
                'pyarrow.Table or lists by column, as {"id": [1, 2], "label": ["a", "b"]}'
            )
        if not table.num_rows or table.num_columns < 2:
            raise DefinitionError(
                f"{self._culprit}: expected has {table.num_rows} rows and the columns "
                f"{names(table.column_names)}; give the id and what is expected, of a row or more"
            )
        return table.replace_schema_metadata(None)


def _plain(values: Any) -> Any:
    """A matrix as a list of its rows, anything else as it is."""
    return list(values) if getattr(values, "ndim", 1) == 2 else values


def _serialized(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return bytes(sink.getvalue())
