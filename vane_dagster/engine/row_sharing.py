"""Rows that fragments of a run have in common, so that only one of them computes or copies them."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vane_dagster._private_folder import new_temporary_file
from vane_dagster.engine.fragment_state import AwaitedRows, FragmentState
from vane_dagster.engine.run_state import RunState
from vane_dagster.errors import ComputeError
from vane_dagster.worker.protocol import Bits, KeyBits, Places, RowLookup, WorkReport, has_bits

_IN_MEMORY = 1 << 20
"""Keys that are kept in memory; more of them are kept in files."""

_Owners = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class SharedRows:
    """The rows of a fragment, divided between itself and other fragments of the run.

    Attributes:
        places: The positions of the rows that are left to compute.
        shares: How many of them each worker's share ends at.
        awaited: The other rows.
    """

    places: Places
    shares: tuple[int, ...]
    awaited: list[AwaitedRows]


class RowSharing:
    """Lets equal rows of a run be computed once, or a stored row be copied once.

    If a stage deduplicates, the fragment that is arranged first computes a row, and is its owner.
    The others compute the rest of their rows, and copy this one once the owner's part is written.
    Rows are shared within a partition, or among all partitions if the stage looks rows up in
    others.

    If it does not, a stored row serves one row of a partition: that of the fragment that is
    arranged first.

    Args:
        state: The run.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._first: dict[tuple[str, str, int | None], FirstOwners] = defaultdict(FirstOwners)
        self._fragments: dict[int, FragmentState] = {}
        self._taken: dict[tuple[str, int], _TakenRecords] = defaultdict(_TakenRecords)

    def share(self, run: FragmentState, stage: str, report: WorkReport) -> SharedRows | None:
        """Return which rows to compute, and which not; None if all.

        Args:
            run: The fragment.
            stage: The stage.
            report: The report of the worker that has arranged its rows.
        """
        if report.new_keys is None:
            return None
        known = np.flatnonzero(report.new_keys)
        self._fragments[run.order] = run
        owners = self._owners(run, stage).claim(report.new_keys[known], run.order)
        taken = known[owners != run.order]
        if run.epoch or not len(taken):
            return None  # a fragment that starts over waits for none: others may wait for it
        places = np.delete(np.arange(len(report.new_keys)), taken)
        shares = tuple(np.searchsorted(places, report.shares).tolist())
        owners = owners[owners != run.order]
        return SharedRows(places, shares, self._awaited(taken, report.new_keys[taken], owners))

    def take_over(
        self, run: FragmentState, stage: str, lost: Sequence[AwaitedRows]
    ) -> tuple[Places, list[AwaitedRows]]:
        """Let a fragment compute rows that their owners have not computed.

        The first fragment that does so becomes the owner. The others wait for it, unless it waits
        for another fragment itself: it could be one of them.

        Args:
            run: The fragment.
            stage: The stage.
            lost: The rows.

        Returns:
            The positions of the rows to compute, and the others.
        """
        places = np.concatenate([each.places for each in lost])
        keys = np.concatenate([each.keys for each in lost])
        former = np.concatenate([np.full(len(each.keys), each.owner.order) for each in lost])
        owners = self._owners(run, stage).replace(keys, former, run.order)
        may_wait = np.array([n for n in np.unique(owners).tolist() if self._is_free(run, stage, n)])
        waits = np.isin(owners, may_wait)
        return places[~waits], self._awaited(places[waits], keys[waits], owners[waits])

    def take(self, run: FragmentState, stage: str, report: WorkReport) -> bool:
        """Take the stored rows that were found for a fragment, if each serves one row.

        If another fragment has taken one of them, none is taken. The rows have to be looked up
        again, without those that are taken.

        Args:
            run: The fragment.
            stage: The stage.
            report: The report of the worker that has arranged its rows.

        Returns:
            Whether they were taken.
        """
        known = run.known.get(stage)
        if report.taken is None or not isinstance(known, RowLookup):
            return True
        records = self._taken[stage, run.partition]
        records.release(run.taken.pop(stage, np.zeros(0, np.int64)))
        if not records.take(report.taken):
            run.known[stage] = replace(known, taken=records.bits.copy())
            return False
        run.taken[stage] = report.taken
        return True

    def _is_free(self, run: FragmentState, stage: str, order: int) -> bool:
        """Whether another fragment has computed a stage, or does so without waiting."""
        other = self._fragments[order]
        if other is run or other.epoch:
            return False
        task_state = other.task_states.get(stage)
        return task_state is None or not task_state.awaited

    def _awaited(self, places: Places, keys: KeyBits, owners: Places) -> list[AwaitedRows]:
        order = np.argsort(owners, kind="stable")
        numbers, starts = np.unique(owners[order], return_index=True)
        both = [np.split(each[order], starts[1:]) for each in (places, keys)]
        return [
            AwaitedRows(self._fragments[number], *own)
            for number, *own in zip(numbers.tolist(), *both)
        ]

    def _owners(self, run: FragmentState, stage: str) -> FirstOwners:
        definition = self._state.plan.partitions[run.partition].stages[stage].row_definition
        spec = self._state.pipeline[stage].spec
        assert spec.runs_udf
        partition = None if spec.reuse.partitions else run.partition
        return self._first[stage, definition, partition]


class _TakenRecords:
    """The stored records that serve a row, as bits."""

    def __init__(self) -> None:
        self.bits: Bits = np.zeros(0, np.uint8)

    def take(self, places: Places) -> bool:
        """Take records for rows, or none if one of them is taken; return whether it did."""
        if has_bits(self.bits, places).any():
            return False
        size = int(places.max(initial=-1)) // 8 + 1
        if size > len(self.bits):
            self.bits = np.concatenate([self.bits, np.zeros(size, np.uint8)])
        np.bitwise_or.at(self.bits, places >> 3, np.uint8(1) << (places & 7).astype(np.uint8))
        return True

    def release(self, places: Places) -> None:
        """Let records serve other rows."""
        np.bitwise_and.at(self.bits, places >> 3, ~(np.uint8(1) << (places & 7).astype(np.uint8)))


class FirstOwners:
    """The first owner of each of very many keys, by 64 bits of them.

    The keys are in sorted runs, which are merged so that each is at most half as large as the one
    before it. The larger ones are in files, whose pages the system can evict.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[KeyBits, _Owners]] = []

    def claim(self, keys: KeyBits, owner: int) -> Places:
        """Return the owner of each key; an owner becomes that of those without one.

        Args:
            keys: The keys.
            owner: The new owner.
        """
        order = np.argsort(keys)
        wanted = keys[order]
        found = np.full(len(wanted), -1, np.int64)
        for known, owners in self._runs:
            at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            is_found = known[at] == wanted
            found[is_found] = owners[at[is_found]]
        if len(new := wanted[found < 0]):
            run = (new, np.full(len(new), owner, np.uint32))
            while self._runs and len(self._runs[-1][0]) < 2 * len(run[0]):
                run = _merged(self._runs.pop(), run)
            self._runs.append(run)
        result = np.empty_like(found)
        result[order] = np.where(found < 0, owner, found)
        return result

    def replace(self, keys: KeyBits, former: Places, owner: int) -> Places:
        """Replace the owner of each key that still has the former one; return the owners now.

        Args:
            keys: The keys.
            former: The former owner of each.
            owner: The new owner.
        """
        found = np.full(len(keys), owner, np.int64)
        for known, owners in self._runs:
            at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
            is_found = known[at] == keys
            is_former = is_found & (owners[at] == former)
            owners[at[is_former]] = owner
            found[is_found] = owners[at[is_found]]
        return found


def _merged(
    some: tuple[KeyBits, _Owners], others: tuple[KeyBits, _Owners]
) -> tuple[KeyBits, _Owners]:
    """Merge two sorted runs, a section at a time."""
    rows = len(some[0]) + len(others[0])
    keys, owners = _array(rows, np.uint64), _array(rows, np.uint32)
    last = done = 0
    for start in range(0, len(some[0]), _IN_MEMORY):
        end = start + _IN_MEMORY
        until = len(others[0])
        if end < len(some[0]):
            until = int(np.searchsorted(others[0], some[0][end]))
        section = np.concatenate([some[0][start:end], others[0][last:until]])
        order = np.argsort(section, kind="stable")
        following = done + len(section)
        keys[done:following] = section[order]
        owners[done:following] = np.concatenate([some[1][start:end], others[1][last:until]])[order]
        last, done = until, following
    return keys, owners


def _array(rows: int, kind: Any) -> npt.NDArray[Any]:
    """Return an array, in a file if it is large and there is room on the disk."""
    if rows > _IN_MEMORY:
        with contextlib.suppress(OSError, ComputeError), new_temporary_file(".keys") as file:
            os.posix_fallocate(file.fileno(), 0, rows * np.dtype(kind).itemsize)
            return np.asarray(np.memmap(file, kind, "r+", shape=(rows,)))
    return np.empty(rows, kind)
