"""Answers of batches, which the worker of a prompt stage reads in place of calling the provider.

A request is identified by a digest of its body, by the generation of its partition, which `force`
and `retry_quarantined` raise, and, if each row needs a separate answer, by the row's id.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vane_dagster._lazy import pq
from vane_dagster.errors import StageError, StoreError
from vane_dagster.providers.base import Answer, Request
from vane_dagster.providers.batch_api import (
    DIGEST_LENGTH,
    POSTPONED,
    BatchAnswer,
    BatchRequestError,
    Pending,
)
from vane_dagster.providers.http import REFUSED, MalformedResponse
from vane_dagster.retries import TRANSIENT_STATUS
from vane_dagster.storage.batch_records import ANSWERS, ROW_GROUP, digests_in, digests_of
from vane_dagster.storage.damage import read_whole
from vane_dagster.storage.filesystem import StoragePath, in_threads

_MAX_INDEXES = 4
"""How many indexes a worker keeps, one for each stage and run. A request takes 24 bytes."""
_MAX_GROUPS = 64
"""Row groups whose answers a worker keeps."""


@dataclass(frozen=True)
class BatchAnswers:
    """The batches of a stage, when a run began.

    Attributes:
        folder: The folder of the batches.
        ended: The names of those that have ended, the earliest first.
        in_flight: The names of the others.
        id: The column with the rows' ids, if each row needs an answer of its own; else empty.
        generation: The number of the partition's generation.
        max_retries: How often a request that has failed is sent again.
        adds_id: Whether the stage itself does not read the column of ids.
    """

    folder: StoragePath
    ended: tuple[str, ...]
    in_flight: tuple[str, ...]
    id: str
    generation: int
    max_retries: int
    adds_id: bool = False

    def answering(self, provider: Any) -> BatchedProvider:
        """Return a provider that answers by the batches."""
        return BatchedProvider(provider, self)

    def index(self) -> BatchIndex:
        """Return the index of the batches, which is read once in a process."""
        return _index(self.folder, self.ended, self.in_flight)

    def digest(self, request: Request, body: str) -> str:
        """Return the digest that identifies a request."""
        own = request.id if self.id else ""
        text = json.dumps([self.generation, own, body])
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


class BatchedProvider:
    """Answers requests by the answers of batches; those without one are pending."""

    def __init__(self, provider: Any, batches: BatchAnswers) -> None:
        self._provider, self._batches = provider, batches

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`.

        Raises:
            Pending: If the request is in flight, or has to be put into a batch.
        """
        given = self._batches
        body = json.dumps(self._provider.body(request))
        digest = given.digest(request, body)
        failed: list[BatchAnswer] = []
        try:
            known = list(given.index().find(digest))
        except StoreError as error:  # no row causes it
            fix = "If the file is damaged, delete it and its batch's record, and pay for it again"
            raise StageError(f"answers of a batch could not be read: {error}. {fix}") from error
        for stored in known:
            if stored is None:
                raise Pending
            if stored.status == "succeeded":
                return self._read(request, stored)
            if stored.status not in ("canceled", POSTPONED):
                failed.append(stored)
        if failed and not _may_pass(failed[-1]):
            raise BatchRequestError(_problem(failed[-1]))
        if len(failed) > given.max_retries:
            raise BatchRequestError(
                f"{len(failed)} batches returned no answer, the last: {_problem(failed[-1])}"
            )
        raise Pending(digest, body)

    def _read(self, request: Request, answered: BatchAnswer) -> Answer:
        try:
            answer: Answer = self._provider.read(request, json.loads(answered.text))
        except MalformedResponse as error:  # which would be transient
            raise BatchRequestError(str(error)) from error
        return replace(answer, batch_requests=1)


def _may_pass(answer: BatchAnswer) -> bool:
    """Whether a failure is not the request's: of the provider, the account or the time."""
    if answer.status == "expired" or not answer.code:
        return True
    return answer.code in TRANSIENT_STATUS | REFUSED


def _problem(answer: BatchAnswer) -> str:
    status = f"{answer.status} {answer.code}" if answer.code else answer.status
    return f"{status}: {answer.text}" if answer.text else status


class BatchIndex:
    """The requests of some batches by digest, and the answers to them."""

    def __init__(self, folder: StoragePath, names: Sequence[str], in_flight: Sequence[str]) -> None:
        self._folder, self._names = folder, (*in_flight, *names)
        self._in_flight = len(in_flight)
        digests_of_batches = in_threads(
            functools.partial(digests_in, folder), (n + ANSWERS for n in names)
        )
        digests_of_batches[:0] = in_threads(functools.partial(digests_of, folder), in_flight)
        # Half of a digest, which `find` compares as a whole.
        halves = np.array(
            [int(each[:16], 16) for digests in digests_of_batches for each in digests], np.uint64
        )
        order = np.argsort(halves, kind="stable")
        self._halves = halves[order]
        self._batches = np.repeat(
            np.arange(len(digests_of_batches)), [*map(len, digests_of_batches)]
        )[order]
        self._rows = np.array(
            [n for each in digests_of_batches for n in range(len(each))], np.int64
        )[order]
        self._group = functools.lru_cache(_MAX_GROUPS)(self._read_group)

    def find(self, digest: str) -> Iterator[BatchAnswer | None]:
        """Yield the answer of each batch with a request: first None for those in flight."""
        half = np.uint64(int(digest[:16], 16))
        first, end = (np.searchsorted(self._halves, half, side) for side in ("left", "right"))
        for batch, row in zip(self._batches[first:end].tolist(), self._rows[first:end].tolist()):
            if batch < self._in_flight:
                yield None
                continue
            group, place = divmod(row, ROW_GROUP)
            record = self._group(self._names[batch], group)[place]
            if record["digest"] == digest:
                yield BatchAnswer(digest, record["status"], record["text"], record["code"])

    def _read_group(self, name: str, group: int) -> list[dict[str, Any]]:
        def read(file: Any) -> list[dict[str, Any]]:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            rows: list[dict[str, Any]] = parquet.read_row_group(group).to_pylist()
            return rows

        return read_whole(self._folder, f"{name}{ANSWERS}", read)


_index = functools.lru_cache(_MAX_INDEXES)(BatchIndex)
