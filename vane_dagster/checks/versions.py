"""Two versions of the same rows, aligned by id and compared column by column."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster._keywords import require_columns
from vane_dagster._lazy import pc
from vane_dagster._texts import Printed, count, table
from vane_dagster.checks.comparison import (
    Difference,
    Floats,
    Mask,
    apart,
    by_default,
    differing,
    elements,
    floats,
    inside,
    plain,
)
from vane_dagster.errors import StoreError, names
from vane_dagster.storage.dataframes import loaded
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.reader import StoredRows, rows_of
from vane_dagster.storage.store import Store
from vane_dagster.types.kinds import is_floats, is_number, is_text
from vane_dagster.types.schema import ERROR_COLUMN

_MAX_LABELS = 20
_SHOWN = 5


@dataclass(frozen=True)
class ColumnDiff:
    """How a column differs between two versions.

    Attributes:
        column: Its name; of a struct's field, with the names of what it is in: "answer.topic".
        different: Number of rows whose values differ.
        measures: Statistics by name, over the rows that are in both versions: one value for each
            version, or one of the two together.
        labels: Of a column with at most 20 values: how often each pair of different values (first
            version, second version) occurs, the most frequent first.
        examples: Some rows that differ: of numbers and vectors the largest differences, of other
            values the first.
    """

    column: str
    different: int
    measures: Mapping[str, Sequence[float]]
    labels: Mapping[tuple[str, str], int]
    examples: Sequence[Difference]


@dataclass(frozen=True)
class Version:
    """One side of a comparison.

    Attributes:
        name: As the user has named it.
        rows: Its rows in the partitions that are compared.
        columns: Columns that the other version lacks.
    """

    name: str
    rows: int
    columns: Sequence[str]


@dataclass(frozen=True, repr=False)
class Diff(Printed):
    """How two versions of a stage's rows differ. It prints, and draws itself in notebooks.

    Attributes:
        stage: As "docs/embedding".
        before: The first version.
        now: The second version.
        partitions: Number of partitions that both versions have.
        only_before: Number of rows of the first version alone.
        only_now: Number of rows of the second version alone.
        equal: Number of rows with equal values in all columns of both.
        different: Number of the other rows of both.
        columns: How each column, and each field of a struct, differs.
    """

    stage: str
    before: Version
    now: Version
    partitions: int
    only_before: int
    only_now: int
    equal: int
    different: int
    columns: Sequence[ColumnDiff]

    @property
    def is_equal(self) -> bool:
        """Whether both versions have the same rows and columns."""
        lacking = (*self.before.columns, *self.now.columns)
        return not (self.only_before or self.only_now or self.different or lacking)

    def to_dict(self) -> dict[str, Any]:
        """Convert the record to JSON types."""
        columns = [
            asdict(column) | {"labels": [[*pair, n] for pair, n in column.labels.items()]}
            for column in self.columns
        ]
        return asdict(self) | {"columns": columns}

    def tables(self) -> Iterator[tuple[str, Sequence[Sequence[str]]]]:
        """Yield tables with their titles; the first row of each is its header."""
        a, b = self.before, self.now
        yield (
            f"{self.stage}, {count(self.partitions, 'partition')}",
            [
                ("", a.name, b.name),
                ("rows", f"{a.rows:,}", f"{b.rows:,}"),
                ("only here", f"{self.only_before:,}", f"{self.only_now:,}"),
                ("equal", f"{self.equal:,}", f"{self.equal:,}"),
                ("different", f"{self.different:,}", f"{self.different:,}"),
                ("columns only here", ", ".join(a.columns) or "-", ", ".join(b.columns) or "-"),
            ],
        )
        for column in self.columns:
            if not column.different:
                continue
            title = f"{column.column}: {count(column.different, 'row')} differ"
            title = title if column.different > 1 else f"{title}s"
            if column.measures:
                measures = [
                    (name, *[f"{value:.5g}" for value in values], *[""] * (2 - len(values)))
                    for name, values in column.measures.items()
                ]
                yield title, [("", a.name, b.name), *measures]
            if column.labels:
                pairs = [(*pair, f"{number:,}") for pair, number in column.labels.items()]
                yield title, [(a.name, b.name, "rows"), *pairs]
            examples = [(each.id, each.before, each.now) for each in column.examples]
            yield f"{column.column}: rows that differ", [("id", a.name, b.name), *examples]

    def __str__(self) -> str:
        return "\n\n".join(f"{title}\n{table(rows)}" for title, rows in self.tables())


@dataclass(frozen=True)
class Side:
    """A version to compare.

    Attributes:
        name: As the user has named it.
        store: The store that it is in.
        manifests: Its manifests, by partition.
    """

    name: str
    store: Store
    manifests: Mapping[str | None, Manifest]


def compare_versions(
    location: str,
    label: str,
    sides: tuple[Side, Side],
    columns: Sequence[str] | None,
    tolerance: float,
) -> Diff:
    """Compare two versions of a stage's rows by id, in the partitions that both have.

    Without `columns`, all that both have are compared, except usage.
    """
    before, now = sides
    common = [key for key in before.manifests if key in now.manifests]
    if not common:
        raise StoreError(
            f"{location}: {before.name!r} and {now.name!r} have no partition of {label!r} in "
            "common: " + " and ".join(names(map(str, side.manifests)) for side in sides)
        )
    chosen = [[side.manifests[key] for key in common] for side in sides]
    id_name = _id_of(location, chosen)
    schemas = [set().union(*(manifest.schema.names for manifest in side)) for side in chosen]
    require_columns(f"{location}: {label}", columns or (), sorted(set().union(*schemas)))
    comparison = VersionComparison(tolerance)
    for pair in zip(*chosen):
        rows = [rows_of(side.store, label, {None: each}) for side, each in zip(sides, pair)]
        wanted = by_default(rows[0].schema) if columns is None else columns
        both = [n for n in rows[0].schema.names if n in rows[1].schema.names and n != id_name]
        ids = _columns(rows, id_name)
        if ids[0].type != ids[1].type:
            raise StoreError(
                f"{location}: the ids of {label!r} are {ids[0].type} in {before.name!r} and "
                f"{ids[1].type} in {now.name!r}; they cannot be compared"
            )
        chosen_columns = [name for name in both if name in wanted]
        comparison.add(chosen_columns, partial(_columns, rows), ids)
    lacking = [schemas[place] - schemas[1 - place] - {ERROR_COLUMN} for place in (0, 1)]
    versions = [
        Version(side.name, sum(manifest.rows for manifest in own), sorted(columns_of))
        for side, own, columns_of in zip(sides, chosen, lacking)
    ]
    return Diff(
        label,
        versions[0],
        versions[1],
        len(common),
        comparison.only_before,
        comparison.only_now,
        comparison.equal,
        comparison.different,
        comparison.columns(),
    )


class VersionComparison:
    """Compares two versions of a stage, one partition after another.

    Columns are read one at a time: memory holds one column of a partition in both versions.

    Attributes:
        only_before: Number of rows of the first version alone.
        only_now: Number of rows of the second version alone.
        equal: Number of rows with equal values in all columns of both versions.
        different: Number of the other rows of both versions.
    """

    def __init__(self, tolerance: float) -> None:
        self.only_before = self.only_now = self.equal = self.different = 0
        self._tolerance = tolerance
        self._columns: dict[tuple[str, ...], _Column] = {}

    def add(
        self,
        columns: Sequence[str],
        read: Callable[[str], Sequence[pa.Array]],
        ids: Sequence[pa.Array],
    ) -> None:
        """Compare the rows of a partition; `read` reads a column of each version by its ids."""
        before, now = ids
        places = pc.index_in(now, before)
        in_both = np.asarray(places.is_valid())
        rows = places.drop_null()
        self.only_before += len(before) - pc.count_distinct(rows).as_py()
        self.only_now += int(np.count_nonzero(~in_both))
        common = now.filter(pa.array(in_both))
        differs = np.zeros(len(common), bool)
        for name in columns:
            values = read(name)
            pair = values[0].take(rows), values[1].filter(pa.array(in_both))
            for path, a, b in _with_fields((name,), *pair):
                column = self._columns.setdefault(path, _Column(".".join(path), self._tolerance))
                with np.errstate(all="ignore"):  # of infinite numbers
                    differs |= column.add(common, a, b)
        self.different += int(np.count_nonzero(differs))
        self.equal += int(np.count_nonzero(~differs))

    def columns(self) -> list[ColumnDiff]:
        """Return how each column differs."""
        return [column.result() for column in self._columns.values()]


def _id_of(location: str, sides: Sequence[Sequence[Manifest]]) -> str:
    ids = [{manifest.keys[0] for manifest in side if manifest.keys} for side in sides]
    if len(set().union(*ids)) != 1 or not all(ids):
        raise StoreError(
            f"{location}: the rows have no id of one name to compare them by: it is "
            f"{names(sorted(ids[0]))} in the first and {names(sorted(ids[1]))} "
            "in the second version"
        )
    return next(iter(ids[0]))


def _columns(versions: Sequence[StoredRows], name: str) -> list[pa.Array]:
    tables = (loaded(rows.select([name]), "pyarrow.Table") for rows in versions)
    return [plain(table.column(0)) for table in tables]


def _with_fields(
    path: tuple[str, ...], before: pa.Array, now: pa.Array
) -> Iterator[tuple[tuple[str, ...], pa.Array, pa.Array]]:
    """Yield a column, and each field of a struct, with their paths and values."""
    yield path, before, now
    if pa.types.is_struct(before.type) and pa.types.is_struct(now.type):
        _, fields = inside(before, now) or ((), ())
        for name, _, a, b in fields:
            yield from _with_fields((*path, name), a, b)


@dataclass
class _Column:
    """What is known of a column from the partitions compared so far."""

    name: str
    tolerance: float
    different: int = 0
    kinds: set[str] = field(default_factory=set)
    labels: Counter[tuple[Any, Any]] | None = field(default_factory=Counter)
    sums: Floats = field(default_factory=lambda: np.zeros((3, 2)))
    largest: float = 0.0
    worst: list[tuple[float, Difference]] = field(default_factory=list)

    def add(self, ids: pa.Array, before: pa.Array, now: pa.Array) -> Mask:
        """Compare the values of a partition, and return which differ."""
        kinds = {_kind(before.type), _kind(now.type)}
        kind = kinds.pop() if len(kinds) == 1 else "other"
        self.kinds.add(kind)
        differs = differing(before, now, self.tolerance)
        self.different += int(np.count_nonzero(differs))
        self._count_labels(before, now)
        gaps = differs.astype(float)
        if kind == "number":
            a, b = floats(before), floats(now)
            gaps = np.abs(a - b)
            self._add_up(a, b, gaps)
        elif kind == "vector":
            gaps = _distances(before, now)
            self._add_up(gaps)
        gaps = np.nan_to_num(gaps, nan=np.inf)
        rows = np.flatnonzero(differs)
        for i in rows[np.argsort(-gaps[rows], kind="stable")[:_SHOWN]].tolist():
            texts = apart(before.slice(i, 1), now.slice(i, 1))
            shown = Difference(str(ids[i].as_py()), self.name, *texts)
            self.worst.append((float(gaps[i]), shown))
        self.worst = heapq.nlargest(_SHOWN, self.worst, key=lambda each: each[0])
        return differs

    def _add_up(self, *values: Floats) -> None:
        """Add finite values to the sums; the last ones are the distances between the others."""
        for total, each in zip(self.sums[-len(values) :], values):
            finite = each[np.isfinite(each)]
            total += finite.sum(), len(finite)
        self.largest = max(self.largest, finite.max(initial=0.0))

    def _count_labels(self, before: pa.Array, now: pa.Array) -> None:
        """Count pairs of values, while there are few values."""
        if self.labels is None or not self.kinds <= {"text", "boolean"}:
            self.labels = None
            return
        pairs = pa.table({"before": before, "now": now}).group_by(["before", "now"])
        counted = pairs.aggregate([([], "count_all")])
        few = counted.slice(0, _MAX_LABELS**2 + 1).to_pylist()
        self.labels.update({(row["before"], row["now"]): row["count_all"] for row in few})
        if max(len({pair[side] for pair in self.labels}) for side in (0, 1)) > _MAX_LABELS:
            self.labels = None

    def result(self) -> ColumnDiff:
        measures = {} if self.labels or len(self.kinds) > 1 else dict(self._measures())
        pairs = Counter({pair: n for pair, n in (self.labels or {}).items() if pair[0] != pair[1]})
        labels = {(_label(a), _label(b)): n for (a, b), n in pairs.most_common(_MAX_LABELS)}
        examples = [example for _, example in self.worst]
        return ColumnDiff(self.name, self.different, measures, labels, examples)

    def _measures(self) -> Iterator[tuple[str, Sequence[float]]]:
        if not self.sums[-1, 1]:
            return
        before, now, distance = (self.sums[:, 0] / np.maximum(self.sums[:, 1], 1)).tolist()
        if self.kinds == {"number"}:
            yield "mean", [before, now]
            yield "largest difference", [self.largest]
        else:
            yield "mean cosine", [1 - distance]
            yield "smallest cosine", [1 - self.largest]


def _label(value: Any) -> str:
    return "null" if value is None else str(value)


def _kind(kind: pa.DataType) -> str:
    known = {"number": is_number(kind), "text": is_text(kind), "vector": is_floats(kind)}
    known["boolean"] = pa.types.is_boolean(kind)
    return next((name for name, fits in known.items() if fits), "other")


def _distances(before: pa.Array, now: pa.Array) -> Floats:
    """Return one minus the cosine of pairs of vectors; NaN for null, zero and other lengths."""
    _, rows, *components = elements(before, now)
    a, b = map(floats, components)
    ab, aa, bb = (np.bincount(rows, each, len(before)) for each in (a * b, a * a, b * b))
    distances: Floats = 1 - ab / np.sqrt(aa * bb)
    return distances
