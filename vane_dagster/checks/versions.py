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
from vane_dagster.storage.row_keys import row_keys
from vane_dagster.storage.store import Store
from vane_dagster.types.kinds import is_floats, is_number, is_text
from vane_dagster.types.schema import ERROR_COLUMN

_MAX_LABELS = 20
_SHOWN = 5
_QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class ColumnDiff:
    """How a column differs between two versions.

    Attributes:
        column: Its name; of a struct's field, with the names of what it is in: "answer.topic".
        different: Number of rows whose values differ.
        measures: Statistics by name, over the sampled rows that are in both versions: one value
            for each version, or one of the two together.
        labels: Of a column with at most 20 values: how often each pair of different values (first
            version, second version) occurs, the most frequent first.
        examples: Rows that differ most.
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
        sampled: Number of rows that the measures of columns are over.
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
    sampled: int
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
                yield (
                    f"{title}; measured over {count(self.sampled, 'row')}",
                    [("", a.name, b.name), *measures],
                )
            if column.labels:
                pairs = [(*pair, f"{number:,}") for pair, number in column.labels.items()]
                yield title, [(a.name, b.name, "rows"), *pairs]
            examples = [(each.id, each.before, each.now) for each in column.examples]
            shown = f"{column.column}: rows that differ most"
            yield shown, [("id", a.name, b.name), *examples]

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
    sample: int,
) -> Diff:
    """Compare two versions of a stage's rows by id, in the partitions that both have.

    Args:
        location: For messages.
        label: The stage, such as "docs/embedding".
        sides: The versions.
        columns: The columns to compare, of those that both have; None for all but usage.
        tolerance: See `VersionComparison`.
        sample: Number of rows that measures of columns are computed over.

    Raises:
        SchemaError: If neither has a column of `columns`.
        StoreError: If they have no partition in common, or ids of different names or types.
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
    share = sample / max(1, sum(manifest.rows for manifest in chosen[1]))
    comparison = VersionComparison(tolerance, share)
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
        comparison.sampled,
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
        sampled: Number of rows that the measures are over.
    """

    def __init__(self, tolerance: float, share: float) -> None:
        """Create a comparison.

        Args:
            tolerance: See `checks.comparison`.
            share: The share of the rows to sample, from 0 to 1.
        """
        self.only_before = self.only_now = self.equal = self.different = self.sampled = 0
        self._tolerance = tolerance
        self._limit = np.uint64(min(share * 2.0**64, 2.0**64 - 2048))
        self._columns: dict[tuple[str, ...], _Column] = {}

    def add(
        self,
        columns: Sequence[str],
        read: Callable[[str], Sequence[pa.Array]],
        ids: Sequence[pa.Array],
    ) -> None:
        """Compare the rows of a partition.

        Args:
            columns: The columns of both versions, except the id.
            read: Reads the plain values of a column in each version, in the order of their ids.
            ids: The ids of each version.
        """
        before, now = ids
        places = pc.index_in(now, before)
        in_both = np.asarray(places.is_valid())
        rows = places.drop_null()
        self.only_before += len(before) - pc.count_distinct(rows).as_py()
        self.only_now += int(np.count_nonzero(~in_both))
        common = now.filter(pa.array(in_both))
        sampled = self._sample(common)
        self.sampled += int(np.count_nonzero(sampled))
        differs = np.zeros(len(common), bool)
        for name in columns:
            values = read(name)
            pair = values[0].take(rows), values[1].filter(pa.array(in_both))
            for path, a, b in _with_fields((name,), *pair):
                column = self._columns.setdefault(path, _Column(".".join(path), self._tolerance))
                with np.errstate(all="ignore"):  # of infinite numbers
                    differs |= column.add(common, a, b, sampled)
        self.different += int(np.count_nonzero(differs))
        self.equal += int(np.count_nonzero(~differs))

    def columns(self) -> list[ColumnDiff]:
        """Return how each column differs."""
        with np.errstate(all="ignore"):
            return [column.result() for column in self._columns.values()]

    def _sample(self, ids: pa.Array) -> Mask:
        """Choose rows by the hash of their id: the same ones in each run."""
        return np.asarray(row_keys([ids])[0] <= self._limit)


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
    numbers: list[Sequence[Floats]] = field(default_factory=list)
    scores: list[Floats] = field(default_factory=list)
    worst: list[tuple[float, Difference]] = field(default_factory=list)

    def add(self, ids: pa.Array, before: pa.Array, now: pa.Array, sampled: Mask) -> Mask:
        """Compare the values of a partition, and return which differ."""
        kinds = {_kind(before.type), _kind(now.type)}
        kind = kinds.pop() if len(kinds) == 1 else "other"
        self.kinds.add(kind)
        differs = differing(before, now, self.tolerance)
        self.different += int(np.count_nonzero(differs))
        self._count_labels(before, now)
        # The sampled rows, and the first ones that differ, in case that few do.
        rows = np.flatnonzero(sampled | (differs & (np.cumsum(differs) <= _SHOWN)))
        before, now = before.take(rows), now.take(rows)
        scores = _SCORES[kind](before, now)
        self.scores.append(scores[sampled[rows]])
        if kind == "number":
            self.numbers.append([floats(each)[sampled[rows]] for each in (before, now)])
        scores = np.where(differs[rows], np.nan_to_num(scores, nan=np.inf), -1)
        for i in np.argsort(-scores, kind="stable")[:_SHOWN].tolist():
            if scores[i] >= 0:
                texts = apart(before.slice(i, 1), now.slice(i, 1), self.tolerance)
                shown = Difference(str(ids[int(rows[i])].as_py()), self.name, *texts)
                self.worst.append((float(scores[i]), shown))
        self.worst = heapq.nlargest(_SHOWN, self.worst, key=lambda each: each[0])
        return differs

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
        scores = np.concatenate(self.scores)
        scores = scores[np.isfinite(scores)]
        if self.kinds == {"number"}:
            sides = [np.concatenate(side) for side in zip(*self.numbers)]
            finite = [side[np.isfinite(side)] for side in sides]
            if all(map(len, finite)):
                yield "mean", [float(side.mean()) for side in finite]
                for share in _QUANTILES:
                    yield f"{share:.0%} quantile", [float(np.quantile(s, share)) for s in finite]
        if not len(scores):
            return
        if self.kinds == {"number"}:
            yield "largest difference", [float(scores.max())]
        elif self.kinds == {"text"}:
            yield "mean overlap of words", [1 - float(scores.mean())]
        elif self.kinds == {"vector"}:
            yield "mean cosine", [1 - float(scores.mean())]
            yield "smallest cosine", [1 - float(scores.max())]


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


def _overlap(before: str | None, now: str | None) -> float:
    """Return the share of the words of two texts that both have, from 0 to 1."""
    a, b = Counter((before or "").split()), Counter((now or "").split())
    total = a.total() + b.total()
    return 2 * (a & b).total() / total if total else 1.0


def _of_texts(before: pa.Array, now: pa.Array) -> Floats:
    return np.array([1 - _overlap(*each) for each in zip(before.to_pylist(), now.to_pylist())])


_SCORES: Mapping[str, Callable[[pa.Array, pa.Array], Floats]] = {
    "number": lambda before, now: np.abs(floats(before) - floats(now)),
    "text": _of_texts,
    "vector": _distances,
    "boolean": lambda before, now: np.ones(len(before)),
    "other": lambda before, now: np.ones(len(before)),
}
"""How far two values of a kind are apart; NaN if that is unknown."""
