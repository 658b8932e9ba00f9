"""Rows with a known outcome: in the row records of earlier parts, or equal to another row.

`arrange` separates rows to compute from known rows. `restore` combines the results of the former
with copies of the latter, in the order of the input. In between, the rows are in one table, whose
last column has these fields:

- ``place``: the row's position in the input;
- ``key_high``, ``key_low``: its row key, if rows have keys;
- ``part``: the position, among the sources of `RowLookup`, of the part that it is copied from, or
  `COMPUTED`, or `DUPLICATE`;
- ``record``: its position in the part's row records; for a duplicate, the place of the row that it
  equals.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.errors import described
from vane_dagster.sources.base import ROW_ERROR
from vane_dagster.sources.file import url_of
from vane_dagster.sources.files import file_identity
from vane_dagster.storage.column_stats import measure
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.quarantine import PARENTS, TRANSIENT, concat_faults
from vane_dagster.storage.row_keys import row_keys
from vane_dagster.storage.row_records import (
    ID,
    KEY_HIGH,
    KEY_LOW,
    ORIGIN,
    OUTCOME,
    Outcome,
    RecordedPart,
    records_schema,
)
from vane_dagster.types.casts import cast_table
from vane_dagster.types.kinds import is_text
from vane_dagster.types.schema import ERROR_COLUMN, empty_table
from vane_dagster.types.sql import unused
from vane_dagster.types.tensors import unsliced
from vane_dagster.worker.output_ids import numbered, places_within
from vane_dagster.worker.protocol import (
    Arrange,
    Places,
    Restore,
    RowKeying,
    RowLookup,
    SourceFiles,
    Work,
)
from vane_dagster.worker.recorded_rows import find_rows, open_index, stored_rows, take_rows
from vane_dagster.worker.reports import Computed, Tally, WorkReport

COMPUTED, DUPLICATE = -1, -2

_Numbers = npt.NDArray[Any]


def arrange(rows: pa.Table, op: Arrange, files: SourceFiles | None = None) -> Computed:
    """Put the rows to compute first, in their order."""
    marked, wanted, elsewhere = mark(rows, op, files)
    ordered = wanted
    if op.order is not None:
        prompts = op.order.rendered(taken(rows, wanted))
        ordered = wanted[sorted(range(len(prompts)), key=prompts.__getitem__)]
    places = np.concatenate([ordered, np.delete(np.arange(rows.num_rows), wanted)])
    report = WorkReport(Tally(len(wanted)), found_elsewhere=elsewhere)
    return Computed(taken(marked, places), report)


def mark(
    rows: pa.Table, op: Arrange, files: SourceFiles | None = None
) -> tuple[pa.Table, Places, int]:
    """Append the column with what is known of each row.

    Returns the rows, the places of those to compute, and how many are known from other partitions.
    """
    known = _KnownPlaces(rows.num_rows)
    fields: dict[str, _Numbers] = {"place": np.arange(rows.num_rows)}
    if op.keying is not None:
        fields[KEY_HIGH], fields[KEY_LOW] = _keys(rows, op.keying, files)
    if op.known is not None:
        known.look_up(op.known, rows, fields[KEY_HIGH], fields[KEY_LOW])
    fields |= {"part": known.part, "record": known.record}
    column = pa.StructArray.from_arrays([pa.array(each) for each in fields.values()], list(fields))
    marked = rows.append_column(unused("__row", rows.column_names), column)
    return marked, np.flatnonzero(known.part == COMPUTED), known.elsewhere


def _keys(rows: pa.Table, keying: RowKeying, files: SourceFiles | None) -> _Numbers:
    """Return the high and the low half of each row's key."""
    chosen = [rows.column(name) for name in keying.columns]
    if keying.files:
        recorded = {f.url: f for f in files.files} | dict(files.touched) if files else {}
        identities = {url: file_identity(file) for url, file in recorded.items()}
        for place, name in enumerate(keying.columns):
            if name in keying.files and is_text(chosen[place].type):
                chosen[place] = _with_identities(chosen[place], identities, unknown=True)
            elif pa.types.is_string(chosen[place].type):  # it may name a file too
                chosen[place] = _with_identities(chosen[place], identities, unknown=False)
    for name, versions in keying.versions.items():
        values = rows.column(name).to_pylist()
        named = [None if value is None else versions.get(str(value)) for value in values]
        chosen.append(pa.chunked_array([pa.array(named, pa.string())]))
    return row_keys(chosen)


def _with_identities(
    paths: pa.ChunkedArray, identities: Mapping[str, str], unknown: bool
) -> pa.ChunkedArray:
    """Return paths with the identities of their files."""

    def identity(path: str) -> str | None:
        return identities.get(url_of(path)) or (secrets.token_hex(16) if unknown else None)

    named = [None if path is None else (path, identity(path)) for path in paths.to_pylist()]
    kind = pa.struct([("path", paths.type), ("identity", pa.string())])
    return pa.chunked_array([pa.array(named, kind)])


class _KnownPlaces:
    """Where each row of a fragment is found; see the module for the numbers."""

    def __init__(self, rows: int) -> None:
        self.part = np.full(rows, COMPUTED, np.int32)
        self.record = np.full(rows, -1, np.int64)
        self.elsewhere = 0

    def look_up(self, lookup: RowLookup, rows: pa.Table, high: _Numbers, low: _Numbers) -> None:
        """Find rows that equal another one, and rows that have records."""
        wanted = np.arange(len(self.part))
        if ROW_ERROR in rows.column_names:  # rows that the source could not read
            wanted = wanted[_numpy(pc.is_null(rows.column(ROW_ERROR)))[wanted]]
        by_key = self._find_duplicates(wanted, high, low)
        if lookup.groups:
            wanted = wanted[by_key]
            wanted = wanted[self.part[wanted] == COMPUTED]
        first = 0
        for group in lookup.groups:
            if group.parts and len(wanted):
                failed = lookup.inherits_failures and group.is_own
                index = open_index(group.parts, lookup.floor, lookup.equal_rows)
                part, record = find_rows(index, high[wanted], low[wanted], failed=failed)
                is_found = part >= 0
                hits = wanted[is_found]
                self.part[hits] = first + part[is_found]
                self.record[hits] = record[is_found]
                self.elsewhere += 0 if group.is_own else len(hits)
                wanted = wanted[~is_found]
            first += len(group.parts)

    def _find_duplicates(self, wanted: Places, high: _Numbers, low: _Numbers) -> Places:
        """Find rows that equal a former one; return the order of all rows by their keys."""
        # A number of each row has the first bits of its key, then its place among the wanted ones.
        mask = np.uint64((1 << len(wanted).bit_length()) - 1)
        numbers = high[wanted] >> np.uint64(2)
        numbers &= ~mask
        numbers |= np.arange(1 << 61, (1 << 61) + len(wanted), dtype=np.uint64)
        numbers.view(np.float64).sort()  # in the same order as integers, and faster
        equal = 1 + np.flatnonzero((numbers[1:] ^ numbers[:-1]) <= mask)
        is_run = np.diff(equal, prepend=0) > 1  # of equal rows, which begins at the one before
        starts = np.maximum.accumulate(np.where(is_run, equal - 1, 0))
        rows, first = (wanted[numbers[places] & mask] for places in (equal, starts))
        # If keys share their first bits, the rows of all but one of them are computed again.
        same = (high[rows] == high[first]) & (low[rows] == low[first])
        self.part[rows[same]], self.record[rows[same]] = DUPLICATE, first[same]
        return (numbers & mask).astype(np.int64)


def restore(
    pieces: Sequence[pa.Table], given: pa.Table, op: Restore, work: Work, faults: pa.Table | None
) -> Computed:
    """Combine computed rows, copies and duplicates, in the order of the input."""
    return _Restored(given, op, work).computed(pieces, faults)


@dataclass
class _Pieces:
    """Rows, and the position in the arranged rows of the row that each was made from."""

    tables: list[pa.Table] = field(default_factory=list)
    owners: list[Places] = field(default_factory=list)

    def add(self, table: pa.Table, owners: Places) -> None:
        if len(owners):
            self.tables.append(table)
            self.owners.append(owners)

    def expanded(
        self, sources: Places, order: Places, concat: Callable[[list[pa.Table]], pa.Table]
    ) -> tuple[pa.Table, Places]:
        """Give each row of an order the pieces of the row that it has its outcome from."""
        owner = np.concatenate(self.owners)
        if (owner[1:] > owner[:-1]).all():  # at most one piece for each row
            place = np.full(len(order), -1)
            place[owner] = np.arange(len(owner))
            rows = place[sources]
            if (rows < 0).any():
                rows, order = rows[rows >= 0], order[rows >= 0]
            return taken(concat(self.tables), rows), order
        by_owner = np.argsort(owner, kind="stable")
        pieces = np.bincount(owner, minlength=len(order))
        starts, counts = (np.cumsum(pieces) - pieces)[sources], pieces[sources]
        rows = by_owner[np.repeat(starts, counts) + places_within(counts)]
        return taken(concat(self.tables), rows), np.repeat(order, counts)


class _Restored:
    """The rows of a fragment while they are put together."""

    def __init__(self, given: pa.Table, op: Restore, work: Work) -> None:
        self._given, self._op, self._work, self._call = given, op, work, op.call
        info = given.column(given.num_columns - 1)
        self._info = {f.name: _numpy(column) for f, column in zip(info.type, info.flatten())}
        self._order = np.empty(given.num_rows, np.int64)
        self._order[self._info["place"]] = np.arange(given.num_rows)
        self._ids = given.column(op.call.ids[0]).combine_chunks()
        self._nulls = op.call.policy.on_error == "null"
        own = [*op.own, *([ERROR_COLUMN] if self._nulls else [])]
        self._own = pa.schema([work.schema.field(name) for name in own])
        self._outcomes = np.full(given.num_rows, Outcome.FILTERED, np.uint8)
        self._rows, self._faults = _Pieces(), _Pieces()
        keying, now = work.keying or RowKeying((), (), "", ""), datetime.now(UTC)
        here = zip(ORIGIN, (keying.epoch, work.run_id, keying.model, keying.code, now))
        self._records = records_schema(self._ids.type)
        self._origin_schema = pa.schema([self._records.field(name) for name in ORIGIN])
        made = pa.table({name: pa.array([value]) for name, value in here})
        self._origins = [made.cast(self._origin_schema)]
        self._origin = np.zeros(given.num_rows, np.int32)  # the row's place in all of these

    def computed(self, pieces: Sequence[pa.Table], faults: pa.Table | None) -> Computed:
        call, work, info = self._call, self._work, self._info
        if pieces:
            rows = pa.concat_tables(pieces)
            owners = self._computed_from(rows.column(call.origin))
            self._rows.add(rows.select(self._own.names), owners)
            self._outcomes[owners] = Outcome.OUTPUT
        if faults is not None:
            owners = self._computed_from(faults.column("id"))
            self._faults.add(faults, owners)
            may_pass = _numpy(pc.fill_null(faults.column(TRANSIENT), False))
            if ROW_ERROR in self._given.column_names:  # equal rows may be ones that were read
                unread = pc.is_valid(self._given.column(ROW_ERROR))
                may_pass = may_pass | _numpy(unread)[owners]
            self._outcomes[owners] = np.where(may_pass, Outcome.PASSING, Outcome.FAILED)
        self._copy()
        # The row from which each has its outcome, in the order of the input.
        sources = self._order.copy()
        duplicates = np.flatnonzero(info["part"] == DUPLICATE)
        sources[info["place"][duplicates]] = self._order[info["record"][duplicates]]
        outcomes = self._outcomes[sources]
        table, owners = empty_table(work.schema), np.empty(0, np.int64)
        if self._rows.tables:
            own, owners = self._rows.expanded(sources, self._order, pa.concat_tables)
            table = self._output(own, owners)
        records = None
        if self._faults.tables:
            records = self._with_ids(*self._faults.expanded(sources, self._order, concat_faults))
        is_known = info["part"] != COMPUTED
        counts = [int(np.count_nonzero(outcomes == outcome)) for outcome in Outcome]
        return Computed(
            table,
            WorkReport(self._tally(counts)),
            records,
            row_records=self._row_records(outcomes, sources),
            copied=int(np.count_nonzero(is_known)),
            inherited=self._sums(table, is_known[owners]),
        )

    def _computed_from(self, ids: pa.ChunkedArray) -> Places:
        """Return the positions of the rows with these ids: usually of all rows to compute."""
        computed = np.flatnonzero(self._info["part"] == COMPUTED)
        if len(ids) == len(computed):
            expected = self._ids if len(computed) == len(self._ids) else self._ids.take(computed)
            if ids.equals(pa.chunked_array([expected])):
                return computed
        return _numpy(pc.index_in(ids, value_set=self._ids)).astype(np.int64)

    def _copy(self) -> None:
        """Take the outcomes of known rows from their parts."""
        places = np.flatnonzero(self._info["part"] >= 0)
        places = places[np.argsort(self._info["part"][places], kind="stable")]
        numbers, starts = np.unique(self._info["part"][places], return_index=True)
        sources = self._op.known.sources() if self._op.known else []
        for number, owners in zip(numbers.tolist(), np.split(places, starts[1:])):
            part, id = sources[number]
            stored = stored_rows(part, id, self._op.own, len(owners))
            records, values, count = take_rows(stored, self._info["record"][owners])
            self._outcomes[owners] = _numpy(records.column(OUTCOME))
            self._inherit_faults(part, owners, records.column(ID).combine_chunks())
            self._origins.append(cast_table(records, self._origin_schema))
            self._add_known(values, np.repeat(owners, count))
        self._origin[places] = 1 + np.arange(len(places))

    def _add_known(self, own: pa.Table, owners: Places) -> None:
        if self._nulls and ERROR_COLUMN not in own.column_names:
            own = own.append_column(ERROR_COLUMN, pa.nulls(own.num_rows, pa.string()))
        self._rows.add(cast_table(own, self._own), owners)

    def _inherit_faults(self, part: RecordedPart, owners: Places, ids: pa.Array) -> None:
        """Take over the records of rows that failed; with rows of nulls, if they are kept so."""
        failed = self._outcomes[owners] == Outcome.FAILED
        if not failed.any():
            return
        faults = read_part(part.folder, part.faults)
        wanted = ids.filter(pa.array(failed))
        places = pc.index_in(wanted, value_set=faults.column("id").combine_chunks().cast(ids.type))
        records = unsliced(faults).take(places)
        self._faults.add(records, owners[failed])
        if self._nulls:
            pairs = zip(*(records[name].to_pylist() for name in ("message", "error")))
            texts = pa.array([described(message, error) for message, error in pairs], pa.string())
            nulls = {each.name: pa.nulls(len(texts), each.type) for each in self._own}
            self._add_known(pa.table({**nulls, ERROR_COLUMN: texts}), owners[failed])

    def _with_ids(self, records: pa.Table, owners: Places) -> pa.Table:
        """Return records of failed rows under the present ids of these rows."""
        ids = self._call.ids
        rows = taken(self._given.select(list(ids)), owners)
        columns = dict(zip(records.column_names, records.columns))
        columns["id"] = rows.column(ids[0])
        if len(ids) > 1:
            parents = [rows.column(name).combine_chunks() for name in ids[1:]]
            columns[PARENTS] = pa.StructArray.from_arrays(parents, list(ids[1:]))
        columns["fragment"] = pa.array([self._work.fragment] * len(owners), pa.string())
        return pa.table(columns)

    def _output(self, own: pa.Table, owners: Places) -> pa.Table:
        """Return output rows with the ids and passed-on columns of their input rows."""
        call, work = self._call, self._work
        names = [n for n in self._given.column_names if n in {*call.ids, *work.schema.names}]
        rows = taken(self._given.select(names), owners)
        ids = rows.column(call.ids[0])
        columns = dict(zip(rows.column_names, rows.columns)) | {call.origin: ids}
        if call.parent and work.id not in own.column_names:
            columns[work.id] = numbered(ids)
        columns |= dict(zip(own.column_names, own.columns))
        return cast_table(pa.table(columns), work.schema)

    def _tally(self, counts: Sequence[int]) -> Tally:
        """Count all rows by their outcome, and keep what was measured of the computed ones."""
        failed = counts[Outcome.FAILED] + counts[Outcome.PASSING]
        return replace(
            self._work.tally or Tally(),
            rows_in=sum(counts),
            filtered=counts[Outcome.FILTERED],
            quarantined=0 if self._nulls else failed,
            nulled=failed if self._nulls else 0,
        )

    def _sums(self, rows: pa.Table, is_known: npt.NDArray[np.bool_]) -> dict[str, dict[str, float]]:
        """Return the sums of the known rows, among those that a part has."""
        sums = self._work.target.sums if self._work.target else {}
        if not sums or not is_known.any():
            return {}
        measures = measure(rows.select([*sums]).filter(pa.array(is_known)), list(sums), sums)
        return {name: {n: measures[name][n] for n in sums[name]} for name in measures}

    def _row_records(self, outcomes: _Numbers, sources: Places) -> pa.Table | None:
        if self._work.keying is None:
            return None
        schema = self._records
        kinds = self._origin_schema
        # Anew, since the dictionaries of parts keep the values of all former runs.
        plain = pa.schema(
            [(each.name, getattr(each.type, "value_type", each.type)) for each in kinds]
        )
        origins = pa.concat_tables(self._origins).cast(plain).combine_chunks().cast(kinds)
        origins = taken(origins, self._origin[sources])
        keys = {name: self._info[name] for name in (KEY_HIGH, KEY_LOW)}
        rows = taken(pa.table({ID: self._ids, **keys}), self._order)
        columns = dict(zip(rows.column_names, rows.columns)) | dict(zip(ORIGIN, origins.columns))
        columns[OUTCOME] = pa.array(outcomes)
        return pa.table({name: columns[name] for name in schema.names}).cast(schema)


def taken(table: pa.Table, places: Places) -> pa.Table:
    """Return the rows at some positions; without a copy if these are all in order."""
    if len(places) == table.num_rows and (places[1:] > places[:-1]).all():
        return table
    return pc.take(unsliced(table), pa.array(places), boundscheck=False)


def _numpy(array: Any) -> _Numbers:
    """Return an array without nulls as a numpy array."""
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    values: _Numbers = array.to_numpy(zero_copy_only=False)
    return values
