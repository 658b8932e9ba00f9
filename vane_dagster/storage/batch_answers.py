"""Answers of batches, which the worker of a prompt stage uses in place of its provider's.

A request is identified by a digest of its body; where each row needs an answer of its own, also by
the row's id; and by the generation of its partition, which `force` and `retry_quarantined` raise.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np

from vane_dagster._dataclass import dataclass
from vane_dagster._lazy import pq
from vane_dagster.providers.base import Answer, PromptTooLong, Request
from vane_dagster.providers.batch_api import (
    DIGEST_LENGTH,
    WINDOW_SECONDS,
    BatchAnswer,
    BatchRequestError,
    Pending,
)
from vane_dagster.providers.http import MalformedResponse, is_refusal, is_too_long
from vane_dagster.retries import TRANSIENT_STATUS
from vane_dagster.storage.batch_records import ANSWERS, REQUESTS, ROW_GROUP, digests_in
from vane_dagster.storage.damage import read_whole
from vane_dagster.storage.filesystem import Location

_MAX_FILES = 256
"""Files whose digests a worker keeps, at half a megabyte each."""
_MAX_GROUPS = 64
"""Row groups whose answers a worker keeps."""


@dataclass(frozen=True)
class BatchAnswers:
    """The batches of a stage, when a run began.

    Attributes:
        folder: The folder of the batches.
        ended: The names of those that have ended, and when they were made; the earliest first.
        in_flight: The names of the others.
        id: The column with the rows' ids, if each row needs an answer of its own; else empty.
        generation: The generation of the partition.
        max_retries: How often a request that has failed is sent again.
        deadline_s: Seconds after which a request is sent live; None for never.
        adds_id: Whether the stage itself does not read the column of ids.
    """

    folder: Location
    ended: tuple[tuple[str, float], ...]
    in_flight: tuple[str, ...]
    id: str
    generation: int
    max_retries: int
    deadline_s: float | None = None
    adds_id: bool = False

    def answering(self, provider: Any) -> BatchedProvider:
        """Return a provider that answers by the batches."""
        return BatchedProvider(provider, self)

    def digest(self, request: Request, body: str) -> str:
        """Return the digest that identifies a request."""
        own = request.id if self.id else ""
        text = json.dumps([self.generation, own, body])
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


class BatchedProvider:
    """Answers requests by the answers of batches; those without one are pending, or sent live."""

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
        if any(digest in _file(given.folder, name, False) for name in given.in_flight):
            raise Pending
        failed: list[BatchAnswer] = []
        began = now = time.time()
        for name, at in given.ended:
            found = _file(given.folder, name, True).get(digest)
            if found is None:
                continue
            began = min(began, at)
            if found.status == "succeeded":
                return self._read(request, found)
            if found.status != "canceled":
                failed.append(found)
        if failed and not _may_pass(failed[-1]):
            raise _error(failed[-1])
        if given.deadline_s is not None and now + WINDOW_SECONDS > began + given.deadline_s:
            answer: Answer = await self._provider.submit(request)
            return answer
        if len(failed) > given.max_retries:
            raise BatchRequestError(
                f"{len(failed)} batches brought no answer, the last: {_problem(failed[-1])}"
            )
        raise Pending(digest, body)

    def _read(self, request: Request, found: BatchAnswer) -> Answer:
        try:
            answer: Answer = self._provider.read(request, json.loads(found.text))
        except MalformedResponse as error:  # which would be transient
            raise BatchRequestError(str(error)) from error
        return replace(answer, batch_requests=1)


def _may_pass(found: BatchAnswer) -> bool:
    """Whether a failure is not the request's: of the provider, the account or the time."""
    if found.status == "expired" or not found.code:
        return True
    return found.code in TRANSIENT_STATUS or is_refusal(found.code)


def _problem(found: BatchAnswer) -> str:
    status = f"{found.status} {found.code}" if found.code else found.status
    return f"{status}: {found.text}" if found.text else status


def _error(found: BatchAnswer) -> Exception:
    is_long = is_too_long(found.code, found.text)
    return (PromptTooLong if is_long else BatchRequestError)(_problem(found))


class _Requests:
    """The requests of a batch, or their answers, by digest."""

    def __init__(self, folder: Location, name: str, has_answers: bool) -> None:
        self._folder, self._name = folder, f"{name}{ANSWERS if has_answers else REQUESTS}"
        digests = digests_in(folder, self._name)
        # Half of a digest, which `get` compares as a whole.
        halves = np.array([int(each[:16], 16) for each in digests], np.uint64)
        self._places = np.argsort(halves, kind="stable")
        self._halves = halves[self._places]
        self._group = functools.lru_cache(_MAX_GROUPS)(self._read_group)

    def __contains__(self, digest: str) -> bool:
        return self._place(digest) is not None

    def _place(self, digest: str) -> int | None:
        half = np.uint64(int(digest[:16], 16))
        at = int(np.searchsorted(self._halves, half))
        is_found = at < len(self._halves) and self._halves[at] == half
        return int(self._places[at]) if is_found else None

    def get(self, digest: str) -> BatchAnswer | None:
        """Return the answer to a request; None without one."""
        if (place := self._place(digest)) is None:
            return None
        group, row = divmod(place, ROW_GROUP)
        found = self._group(group)[row]
        if found["digest"] != digest:
            return None
        return BatchAnswer(digest, found["status"], found["text"], found["code"])

    def _read_group(self, group: int) -> list[dict[str, Any]]:
        def read(file: Any) -> list[dict[str, Any]]:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            rows: list[dict[str, Any]] = parquet.read_row_group(group).to_pylist()
            return rows

        return read_whole(self._folder, self._name, read)


_file = functools.lru_cache(_MAX_FILES)(_Requests)
"""Those that this worker has read; a file with a name never changes."""
