"""`diff`: two versions of a stage's rows, side by side."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from typing import Any

import pyarrow as pa

from vane_dagster._arguments import positive
from vane_dagster._keywords import known_keywords
from vane_dagster._texts import count
from vane_dagster.checks.base import bound
from vane_dagster.checks.versions import ColumnDiff, VersionComparison
from vane_dagster.errors import StoreError, names
from vane_dagster.orchestration.read import asset_path, open_store
from vane_dagster.storage.dataframes import loaded
from vane_dagster.storage.filesystem import Location, absolute_url, in_threads
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.reader import StoredRows, find_all, rows_of
from vane_dagster.storage.store import Store
from vane_dagster.types.schema import ERROR_COLUMN

_RUN = re.compile(r"[0-9a-f-]+")
LATEST = "latest"
"""The name of the version in force."""


@dataclass(frozen=True)
class Version:
    """One side of a comparison.

    Attributes:
        name: As the user has named it.
        rows: Its rows in the partitions that are compared.
        seconds_per_thousand: Worker seconds of a thousand computed rows; None if unknown.
        tokens_per_thousand: Tokens of a thousand computed rows; None without prompts.
        columns: Columns that the other version lacks.
    """

    name: str
    rows: int
    seconds_per_thousand: float | None
    tokens_per_thousand: float | None
    columns: Sequence[str]


@dataclass(frozen=True)
class Diff:
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
        columns: How each column differs.
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
                ("worker s per 1,000 rows", *_amounts(a, b, "seconds_per_thousand")),
                ("tokens per 1,000 rows", *_amounts(a, b, "tokens_per_thousand")),
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
            yield f"{column.column}: rows that differ most", [("id", a.name, b.name), *examples]

    def _repr_html_(self) -> str:
        return "".join(
            f"<table><caption>{escape(title)}</caption>"
            f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in rows[0])}</tr>"
            + "".join(
                f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
                for row in rows[1:]
            )
            + "</table>"
            for title, rows in self.tables()
        )


@known_keywords("vd.diff")
def diff(
    stage: Any,
    before: str,
    now: str = LATEST,
    *,
    partitions: Sequence[str] | None = None,
    store: Any = None,
    tolerance: float = 0.0,
    sample: int = 20_000,
) -> Diff:
    """Compare two versions of a stage's stored rows by id. It reads the store and computes nothing.

    A version is the rows that a run has committed, named by the beginning of the run's id; those of
    another store, named by its root; or `"latest"`, those in force. A version of a run is there
    until the store is collected.

    Args:
        stage: As "docs/embedding", or a stage or its asset key.
        before: The first version.
        now: The second version. A name of hexadecimal digits and dashes is that of a run; give a
            store with such a name as "./name".
        partitions: Keys of the partitions to compare. Default: those that both versions have.
        store: The store of the runs and of `"latest"`: a `FragmentStore`, or the URL of a root.
            Default: ``$VANE_DAGSTER_STORE``, else a folder of this user.
        tolerance: Largest difference of equal numbers and components of vectors, relative to one
            plus their magnitude.
        sample: Number of rows that means, quantiles, overlaps and cosines are computed over. Rows
            that are equal, different or in one version alone are always counted exactly.

    Returns:
        The differences. Print them, display them in a notebook, or convert them to a dict.

    Raises:
        StoreError: If there is no such version, the versions have no partition in common, their ids
            have different names or types, or files of a former version were collected.
    """
    location = "vd.diff"
    positive(location, "sample", sample)
    bound(location, "tolerance", tolerance)
    path = asset_path(stage, location)
    label = "/".join(path)
    wanted = None if partitions is None else [*dict.fromkeys(partitions)]
    sides = []
    for name in (before, now):
        is_store = name != LATEST and not _RUN.fullmatch(name)
        opened = open_store(store, location)
        if is_store:
            url = absolute_url(name)
            opened = Store(Location(url, opened.root.options_for(url)))
        if name == LATEST or is_store:
            manifests = find_all(opened, path, wanted)
        else:
            manifests = _of_run(opened, path, name)
        sides.append((name, opened, manifests))
    common = [key for key in sides[0][2] if key in sides[1][2] and key in (wanted or sides[0][2])]
    if not common:
        raise StoreError(
            f"{location}: {before!r} and {now!r} have no partition of {label!r} in common: "
            + " and ".join(names(map(str, manifests)) for _, _, manifests in sides)
        )
    chosen = [[manifests[key] for key in common] for _, _, manifests in sides]
    id_name = _id_of(location, chosen)
    share = sample / max(1, sum(manifest.rows for manifest in chosen[1]))
    comparison = VersionComparison(tolerance, share)
    for pair in zip(*chosen):
        rows = [rows_of(side[1], label, {None: each}) for side, each in zip(sides, pair)]
        columns = [n for n in rows[0].schema.names if n in rows[1].schema.names and n != id_name]
        ids = _columns(rows, id_name)
        if ids[0].type != ids[1].type:
            raise StoreError(
                f"{location}: the ids of {label!r} are {ids[0].type} in {before!r} and "
                f"{ids[1].type} in {now!r}; they cannot be compared"
            )
        comparison.add(columns, partial(_columns, rows), ids)
    schemas = [set().union(*(manifest.schema.names for manifest in side)) for side in chosen]
    versions = [
        _version(name, side, sorted(schemas[place] - schemas[1 - place] - {ERROR_COLUMN}))
        for place, ((name, _, _), side) in enumerate(zip(sides, chosen))
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


def _of_run(store: Store, path: Sequence[str], run: str) -> dict[str | None, Manifest]:
    """Return the last manifest of each partition that a run has committed."""
    found: dict[str | None, Manifest] = {}
    runs: Counter[str] = Counter()
    place = ("/".join(path[:-1]), path[-1])
    named = store.history(*place)
    opened = in_threads(lambda each: store.opened_if_there(*place, each[0], str(each[1])), named)
    for manifest in opened:
        if manifest is not None:
            runs[manifest.run_id] += 1
            if manifest.run_id.startswith(run):
                found[manifest.partition] = manifest
    if not found:
        known = names(runs) if runs else "none"
        raise StoreError(
            f"vd.diff: no run {run!r} has committed rows of {'/'.join(path)!r} in "
            f"{store.root.url!r}, or they were collected; the runs there are: {known}"
        )
    if len({manifest.run_id for manifest in found.values()}) > 1:
        raise StoreError(f"vd.diff: several runs begin with {run!r}; give more of the id")
    return found


def _id_of(location: str, sides: Sequence[Sequence[Manifest]]) -> str:
    ids = [{manifest.keys[0] for manifest in side if manifest.keys} for side in sides]
    if len(set().union(*ids)) != 1 or not all(ids):
        raise StoreError(
            f"{location}: the rows have no id of one name to compare them by: it is "
            f"{names(sorted(ids[0])) or 'none'} in the first and {names(sorted(ids[1])) or 'none'} "
            "in the second version"
        )
    return next(iter(ids[0]))


def _columns(versions: Sequence[StoredRows], name: str) -> tuple[pa.Array, pa.Array]:
    return _column(versions[0], name), _column(versions[1], name)


def _column(rows: StoredRows, name: str) -> pa.Array:
    column = loaded(rows.select([name]), "pyarrow.Table").column(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _version(name: str, manifests: Sequence[Manifest], columns: Sequence[str]) -> Version:
    parts = [part for manifest in manifests for part in manifest.parts]
    computed = sum(part.rows_in - part.copied for part in parts if part.made) / 1000
    seconds = sum(part.made.seconds for part in parts if part.made)
    tokens = [
        sums.get("prompt_tokens", 0) + sums.get("completion_tokens", 0)
        for part in parts
        for sums in part.spent.values()
        if "prompt_tokens" in sums
    ]
    return Version(
        name,
        sum(manifest.rows for manifest in manifests),
        seconds / computed if computed else None,
        sum(tokens) / computed if tokens and computed else None,
        columns,
    )


def _amounts(before: Version, now: Version, field: str) -> Iterator[str]:
    for version in (before, now):
        value: Mapping[str, Any] | float | None = getattr(version, field)
        yield "-" if value is None else f"{value:,.3g}"
