"""Decisions of people about single rows of a stage: waivers of failed rows, and patches.

``<root>/<pipeline>/<kind>-<stage>-<random>.json``, with the ids and the row keys of the rows. The
outputs of a patch are in ``<root>/<pipeline>/<stage>/patches``, in two files that are read like a
part and its row records. Nothing deletes either: no run could make them again. The record is
written last and alone names the files, so those of a process that died before are never read.

A decision belongs to an id and a row key, so it holds while the row has the values that it had. A
waiver also ends when a run commits its partition without the failure. The later of two patches of a
row counts. To undo a decision for some of its ids is a decision too: its record names the other
one, and is counted, found and promoted in the same way.
"""

from __future__ import annotations

import functools
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import field, replace
from datetime import UTC, datetime
from typing import Any, Literal

import pyarrow as pa

from vane_dagster._dataclass import dataclass
from vane_dagster._home import user_name
from vane_dagster._lazy import pc
from vane_dagster.errors import StoreError, names
from vane_dagster.storage.codec import UNRECORDED, Codec, read_file
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.manifest import Manifest, PartInfo
from vane_dagster.storage.part_file import encoded, read_part
from vane_dagster.storage.row_records import (
    ID,
    KEY_HIGH,
    KEY_LOW,
    ORIGIN,
    OUTCOME,
    SUFFIX,
    Outcome,
    RecordedPart,
    records_schema,
    write_records,
)
from vane_dagster.storage.store import Store, copy_missing

PATCH_ID = "_vane_id"
"""The column of a patch's outputs with the id of the input row."""
_NAME = re.compile(r"(?:un)?(?:waived|patched)-(\w+)-[0-9a-f]{16}\.json")
PATCHES = "patches"
"""The folder of the outputs of patches, in the stage's."""
_SHOWN = 5
_FRAGMENT = "fragment"
_FAILURES = (Outcome.FAILED, Outcome.PASSING)

Kind = Literal["waived", "patched", "unwaived", "unpatched"]


@dataclass(frozen=True)
class Decision:
    """A decision about some rows of a stage in a partition.

    Attributes:
        kind: "waived" or "patched", or what undoes one of these.
        stage: The stage.
        partition: The partition's key; None for an unpartitioned pipeline.
        ids: The ids of the input rows.
        keys: The row key of each, as 32 hex digits.
        user: Who decided.
        at: Unix time in seconds.
        reason: Why, for people.
        elsewhere: Identities of the fragments that were known not to have the rows. The fragment
            keys of all others depend on a patch.
        schema: The columns of a patch; None for a waiver.
        rows: The name of a patch's outputs, without suffix.
        undoes: The name of the decision that it undoes for its ids; empty for others.
        undone: Ids for which it was undone, which are not among `ids`; not recorded.
        name: The record's file name; not recorded.
        folder: The pipeline's folder that it is in, of a branch or of its fallback; not recorded.
    """

    kind: Kind
    stage: str
    partition: str | None
    ids: Sequence[Any]
    keys: Sequence[str]
    user: str
    at: float
    reason: str = ""
    elsewhere: Set[str] = frozenset()
    schema: pa.Schema | None = None
    rows: str = ""
    undoes: str = ""
    undone: Sequence[Any] = field(default=(), metadata=UNRECORDED)
    name: str = field(default="", metadata=UNRECORDED)
    folder: StoragePath | None = field(default=None, repr=False, compare=False, metadata=UNRECORDED)

    @property
    def is_waiver(self) -> bool:
        """Whether it accepts failures."""
        return self.kind == "waived"

    @property
    def is_patch(self) -> bool:
        """Whether it supplies outputs."""
        return self.kind == "patched"

    def changes(self, fragment: str) -> bool:
        """Whether it supplies or undoes outputs of a fragment, given by its identity."""
        return self.kind in ("patched", "unpatched") and fragment not in self.elsewhere

    def covering(self, manifest: Manifest | None) -> Decision:
        """Return a waiver with the rows that it still covers after a manifest's commit."""
        left = None if manifest is None else manifest.decisions.get(self.name)
        return self if left is None or not self.is_waiver else self._of({*left})

    def without(self, ids: Set[Any]) -> Decision:
        """Return the decision as it is when it was undone for some ids."""
        return replace(self._of({*self.ids} - ids), undone=[*ids]) if ids else self

    def _of(self, ids: Set[Any]) -> Decision:
        pairs = [pair for pair in zip(self.ids, self.keys) if pair[0] in ids]
        return replace(self, ids=tuple(p[0] for p in pairs), keys=tuple(p[1] for p in pairs))

    def part(self) -> RecordedPart:
        """Return a patch's outputs, as a part with row records."""
        assert self.folder is not None, "it was read from the store"
        folder, undone = self.folder.child(self.stage, PATCHES), tuple(self.undone)
        return RecordedPart(folder, f"{self.rows}.parquet", f"{self.rows}{SUFFIX}", undone=undone)


_CODEC = Codec(Decision)


def decisions(
    store: Store,
    pipeline: str,
    stages: Collection[str],
    records: Mapping[str, StoragePath] | None = None,
) -> dict[tuple[str, str | None], tuple[Decision, ...]]:
    """Read the decisions about some stages, by stage and partition, the earliest first.

    Those that were undone for some of their ids are there without these.
    """
    files = store.records(pipeline) if records is None else records
    wanted = sorted(n for n in files if (match := _NAME.fullmatch(n)) and match[1] in stages)
    fix = "Restore it; without it, the decision is lost"

    def read(name: str) -> Decision | None:
        load = functools.partial(_CODEC.load, name=name, folder=files[name])
        return read_file(files[name], name, load, fix)

    by_place: dict[tuple[str, str | None], tuple[Decision, ...]] = {}
    every = sorted(filter(None, in_threads(read, wanted)), key=lambda each: each.at)
    undone: dict[str, set[Any]] = {each.name: set() for each in every}
    for each in every:
        if each.undoes in undone:
            undone[each.undoes].update(each.ids)
    for each in every:
        place = (each.stage, each.partition)
        by_place[place] = (*by_place.get(place, ()), each.without(undone[each.name]))
    return by_place


def waive(
    store: Store, manifest: Manifest, ids: Sequence[Any], reason: str, location: str
) -> Decision:
    """Record that failed rows of a partition may be missing; takes effect with the next run.

    Args:
        store: The store.
        manifest: The partition's manifest in force.
        ids: The ids of quarantined rows.
        reason: Why.
        location: The stage, for messages.

    Raises:
        StoreError: If the rows have no keys.
    """
    failed = _find(store, manifest, ids, location)
    return _keep(store, manifest.pipeline, _decision("waived", manifest, failed, reason))


def patch(
    store: Store, manifest: Manifest, ids: pa.ChunkedArray, columns: pa.Table, location: str
) -> Decision:
    """Record outputs of rows of a partition; takes effect with the next run.

    Args:
        store: The store.
        manifest: The partition's manifest in force.
        ids: The id of each row in the stage's input.
        columns: All columns that the stage makes, in their types.
        location: The stage and partition, for messages.

    Raises:
        StoreError: If an id is not in the partition, or its rows have no keys.
    """
    failed = _find(store, manifest, ids.to_pylist(), location)
    decision = _decision("patched", manifest, failed, "")
    held = set(failed.column(_FRAGMENT).to_pylist())
    elsewhere = {each.identity for i, each in enumerate(manifest.fragments) if i not in held}
    folder, origin = store.root.child(manifest.pipeline, manifest.stage, PATCHES), (
        Outcome.PATCHED, 0, decision.name.removesuffix(".json"), decision.user, "",
        datetime.fromtimestamp(decision.at, UTC),
    )  # fmt: skip
    schema = records_schema(failed.schema.field(ID).type)
    given = dict(zip((OUTCOME, *ORIGIN), ([value] * len(failed) for value in origin)))
    given |= {name: failed.column(name) for name in (KEY_HIGH, KEY_LOW, ID)}
    records = pa.table({name: given[name] for name in schema.names}, schema=schema)
    rows = write_records(folder, origin[2], records).removesuffix(SUFFIX)
    places = pc.index_in(failed.column(ID), value_set=ids.combine_chunks().cast(failed[ID].type))
    outputs = columns.take(places).add_column(0, PATCH_ID, failed.column(ID))
    folder.write(f"{rows}.parquet", encoded(outputs))
    decision = replace(decision, elsewhere=elsewhere, schema=columns.schema, rows=rows)
    return _keep(store, manifest.pipeline, decision)


def undo(store: Store, pipeline: str, decision: Decision, ids: Set[Any]) -> Decision:
    """Record that a decision does not count for some of its ids; takes effect with the next run."""
    kind: Kind = "unpatched" if decision.is_patch else "unwaived"
    name = _new_name(kind, decision.stage)
    rest = replace(decision, user=user_name(), at=time.time(), reason="", schema=None, rows="")
    rest = replace(rest._of(ids), kind=kind, undoes=decision.name, undone=(), name=name)
    return _keep(store, pipeline, rest)


def _decision(kind: Kind, manifest: Manifest, failed: pa.Table, reason: str) -> Decision:
    return Decision(
        kind,
        manifest.stage,
        manifest.partition,
        tuple(failed.column(ID).to_pylist()),
        tuple(_hex_keys(failed)),
        user_name(),
        time.time(),
        reason,
        name=_new_name(kind, manifest.stage),
    )


def _new_name(kind: Kind, stage: str) -> str:
    return f"{kind}-{stage}-{secrets.token_hex(8)}.json"


def _keep(store: Store, pipeline: str, decision: Decision) -> Decision:
    folder = store.root.child(pipeline)
    folder.write(decision.name, _CODEC.dumps(decision))
    return replace(decision, folder=folder)


def copy_decisions(source: Store, target: Store, manifest: Manifest) -> None:
    """Copy the decisions that a manifest was made with, from a branch."""
    folder, other = (each.root.child(manifest.pipeline) for each in (source, target))
    rows = tuple(name.removesuffix(".json") for name in manifest.decisions)
    place = (manifest.stage, PATCHES)
    copy_missing(folder.child(*place), other.child(*place), lambda name: name.startswith(rows))
    copy_missing(folder, other, manifest.decisions.__contains__)


def _find(store: Store, manifest: Manifest, ids: Sequence[Any], location: str) -> pa.Table:
    """Return the records of input rows, each with the index of its fragment."""
    if not ids:
        raise StoreError(f"{location}: there is no id; give at least one")
    if any(part.rows_in and not part.row_records for part in manifest.parts):
        raise StoreError(
            f"{location}: its rows have no row keys, by which a decision is found again. Declare "
            "the stage with columns= and reuse='rows', and materialize it"
        )
    parts = [(index, part) for index, part in enumerate(manifest.parts) if part.row_records]
    folder = store.parts_of(manifest)

    def read(item: tuple[int, PartInfo]) -> pa.Table:
        index, part = item
        records = read_part(folder, part.row_records, (ID, KEY_HIGH, KEY_LOW))
        try:
            wanted = pa.array(list(ids)).cast(records.schema.field(ID).type)
        except pa.ArrowException as error:
            raise StoreError(f"{location}: ids {names(ids, _SHOWN)}: {error}") from None
        rows = records.filter(pc.is_in(records.column(ID), value_set=wanted))
        return rows.append_column(_FRAGMENT, pa.array([index] * len(rows), pa.int64()))

    tables = in_threads(read, parts)
    known = {str(id) for table in tables for id in table.column(ID).to_pylist()}
    if missing := [id for id in ids if str(id) not in known]:
        raise StoreError(
            f"{location}: the partition has no input row with id {names(missing, _SHOWN)}. Name "
            "its partition, and materialize it if the row is new"
        )
    return pa.concat_tables(tables).combine_chunks()


def count_waived(folder: StoragePath, manifest: Manifest, given: Sequence[Decision]) -> Manifest:
    """Return a manifest that is about to be committed with the decisions that it was made with.

    A waiver counts for the rows that fail, and ends for the others.
    """
    waivers = [each for each in given if each.is_waiver]
    waived: dict[tuple[Any, str], str] = {
        pair: each.name for each in waivers for pair in zip(each.ids, each.keys)
    }
    counted: dict[str, list[Any]] = {each.name: [] for each in given}
    parts = []
    for part in manifest.parts:
        rows = 0
        if waived and part.row_records and part.quarantined + part.nulled:
            records = read_part(folder, part.row_records, (ID, KEY_HIGH, KEY_LOW, OUTCOME))
            failed = pc.is_in(records.column(OUTCOME), value_set=pa.array(_FAILURES, pa.uint8()))
            records = records.filter(failed)
            for pair in zip(records.column(ID).to_pylist(), _hex_keys(records)):
                if name := waived.get(pair):
                    counted[name].append(pair[0])
                    rows += 1
        parts.append(replace(part, waived=rows))
    return replace(manifest, parts=parts, decisions=counted)


def _hex_keys(records: pa.Table) -> list[str]:
    pairs = zip(*(records.column(name).to_pylist() for name in (KEY_HIGH, KEY_LOW)))
    return [f"{high:016x}{low:016x}" for high, low in pairs]
