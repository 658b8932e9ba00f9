"""The batches of a stage in the driver: submission, polling and collection.

The record in the store is the only state of a batch: in doubt, submitted, or ended. No request is
submitted twice: its record is written before the provider is called, no two records have the same
request, and a record in doubt is dropped only if the provider, asked long after, does not know the
batch.
"""

from __future__ import annotations

import functools
import math
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vane_dagster.errors import ComputeError, VaneError
from vane_dagster.events import Event, Noticed
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.providers.batch_api import (
    DIGEST_LENGTH,
    POSTPONED,
    WINDOW_SECONDS,
    BatchAnswer,
    BatchApi,
    RefusedBatch,
    RemoteBatch,
)
from vane_dagster.storage.batch_answers import BatchAnswers
from vane_dagster.storage.batch_records import BatchFolder, ProviderBatch, digests_of
from vane_dagster.storage.store import Store

DOUBT_SECONDS = 3600.0
"""How long after a record the provider's list is not yet believed not to have its batch."""
_CLOCK_SECONDS = 600.0
"""By how much the provider's clock may be behind."""
_ATTEMPTS = 20
"""Attempts to record requests that other runs record at the same moment."""

Key = str | None


class StageBatches:
    """The batches of a stage.

    Attributes:
        stage: The name of the stage.
        model: The name of its model.
        folder: Their folder in the store.
        batches: Their records as of the last `refresh`, the earliest first.
    """

    def __init__(
        self,
        store: Store,
        pipeline: str,
        spec: Any,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder = BatchFolder(store, pipeline, spec.name)
        self.stage = spec.name
        self.model = spec.model.name
        self.location = f"stage '{pipeline}/{spec.name}'"
        self.batches: list[ProviderBatch] = []
        self._spec, self._clock, self._sleep = spec, clock, sleep
        self._digests = functools.cache(self._read_digests)
        self._seen: Set[str] = frozenset()

    @property
    def in_flight(self) -> list[ProviderBatch]:
        """Those that have not ended."""
        return [each for each in self.batches if not each.ended_at]

    def waiting(self) -> set[Key]:
        """Return the partitions that wait for batches.

        They are in flight, or others have to end before the provider has room for them.
        """
        ended = [each.ended_at for each in self.batches if POSTPONED not in each.counts]
        room_since = max(ended, default=0.0) if self.in_flight else math.inf
        postponed = [each for each in self.batches if POSTPONED in each.counts]
        waiting = [*self.in_flight, *(each for each in postponed if each.ended_at > room_since)]
        return {key for each in waiting for key in each.partitions}

    @property
    def own_answers(self) -> bool:
        """Whether equal requests of different rows have answers of their own."""
        if self._spec.reuse.mode == "rows":
            return bool(self._spec.reuse.per_row)
        return not self._spec.model_task.is_greedy

    @contextmanager
    def _connected(self) -> Iterator[BatchApi]:
        """Connect to the provider. Its errors get the location of the stage."""
        try:
            api = self._spec.batch_api()
        except ImportError as error:
            raise ComputeError(f"{self.location}: the run calls the batch API: {error}") from error
        try:
            yield api
        except ComputeError as error:
            raise type(error)(f"{self.location}: {error}") from error
        finally:
            api.close()

    # Looking and collecting

    def read(self) -> list[ProviderBatch]:
        """Read the records, without a look at the provider."""
        self.batches = self.folder.batches()
        return self.batches

    def refresh(self) -> None:
        """Look at the batches in flight, and store the answers of those that have ended."""
        before = self.read()
        if self.in_flight:
            known = {each.id for each in before}
            with self._connected() as api:
                found = [each if each.id else self._looked_up(api, each, known) for each in before]
                self.batches = [
                    each if each.ended_at or not each.id else self._looked_at(api, each)
                    for each in found
                    if each is not None
                ]
        self._seen = {each.name for each in self.batches if each.ended_at}

    def _looked_up(
        self, api: BatchApi, batch: ProviderBatch, known: Collection[str]
    ) -> ProviderBatch | None:
        """Look for the batch of a record without an id; None if there is none."""
        may_be = self._clock() < batch.at + DOUBT_SECONDS
        for remote in api.since(batch.at - _CLOCK_SECONDS):
            if remote.id in known:
                continue
            if remote.name is None and remote.requests == batch.requests and not remote.has_ended:
                may_be = True  # its name will be in its answers
            elif _is_of(api, remote, batch):
                submitted = replace(batch, id=remote.id, expected=remote.expires_at)
                self.folder.write(submitted)
                return submitted
        if may_be:
            return batch
        self.folder.drop(batch)
        return None

    def _looked_at(self, api: BatchApi, batch: ProviderBatch) -> ProviderBatch:
        """Look at a submitted batch: store its answers if it has ended."""
        remote, now = api.get(batch.id), self._clock()
        if not remote.has_ended:
            return batch
        digests = digests_of(self.folder.path, batch.name)
        answers = answers_by_digest(digests, api.answers(remote))
        others = any(each.id and each.name != batch.name for each in self.in_flight)
        lost = lost_answer(remote, now, others)
        answers |= {digest: lost for digest in digests if digest not in answers}
        counts = dict(Counter(each.status for each in answers.values()))
        ended = replace(batch, ended_at=now, counts=counts, is_canceled=remote.is_canceled)
        self.folder.end(ended, answers)
        return ended

    def cancel(self, names: Collection[str]) -> list[ProviderBatch]:
        """Cancel batches in flight by name; return them. Answers that they have are kept."""
        canceled = []
        with self._connected() as api:
            for batch in (each for each in self.in_flight if each.name in names and each.id):
                api.cancel(batch.id)
                canceled.append(replace(batch, is_canceled=True))
                self.folder.write(canceled[-1])
        return canceled

    def answers(self, generation: int, id: str, adds_id: bool) -> BatchAnswers:
        """Return what a worker needs to answer requests of a partition's generation.

        `id` is the column of ids if each row needs a separate answer, else empty.
        """
        return BatchAnswers(
            self.folder.path,
            tuple(each.name for each in self.batches if each.ended_at),
            tuple(each.name for each in self.in_flight),
            id,
            generation,
            self._spec.failures.max_retries or 0,
            adds_id,
        )

    # Submitting

    def submit(
        self,
        asked: Mapping[Key, Sequence[str]],
        record: ProviderBatch,
        emit: Callable[[Event], None],
    ) -> dict[Key, VaneError]:
        """Put new requests into batches, within the limits of the provider.

        Returns the partitions whose requests were not submitted, with the error.
        """
        failed, error = dict[Key, VaneError](), None
        given = (
            (key, digest, body)
            for key, names in asked.items()
            for digest, body in self.folder.asked(names).items()
        )
        with self._connected() as api:
            overhead = len(api.line(_custom_id("0" * DIGEST_LENGTH, _name()), "")) + 1
            for requests, keys in grouped(given, overhead, api.MAX_REQUESTS, api.MAX_BYTES):
                if error is None:
                    batch = replace(record, partitions=tuple(keys))
                    try:
                        self._submit(api, batch, requests, emit)
                        continue
                    except VaneError as refused:
                        error = type(refused)(f"{self.location}: {refused}")
                failed |= dict.fromkeys(keys, error)
        self.folder.forget([name for names in asked.values() for name in names])
        self._add_waiting([key for key in asked if key not in failed], record.stages)
        return failed

    def _submit(
        self,
        api: BatchApi,
        batch: ProviderBatch,
        requests: Mapping[str, str],
        emit: Callable[[Event], None],
    ) -> None:
        """Submit those requests that are in flight in no other batch."""
        for _ in range(_ATTEMPTS):
            taken = self._taken()
            left = {d: body for d, body in requests.items() if d not in taken}
            if not left:
                return
            # Each attempt gets a new name, because digests are cached by name.
            batch = replace(batch, name=_name(), at=self._clock(), requests=len(left))
            self.folder.add(batch, left)
            if self._taken(without=batch.name).isdisjoint(left):
                break
            self.folder.drop(batch)  # another run has recorded some of them since
            self._sleep(random.uniform(0.0, 2.0))
        else:
            raise ComputeError("other runs are submitting the same requests; run it again")
        lines = [api.line(_custom_id(d, batch.name), body) for d, body in left.items()]
        try:
            remote = api.submit(batch.name, lines)
        except RefusedBatch:
            self.folder.drop(batch)
            raise
        except ComputeError as error:
            text = (
                f"{self.location}: it is not known whether a batch of {len(left):,} requests was "
                f"made: {error}. If the provider does not list it {DOUBT_SECONDS / 60:g} minutes "
                "from now, its requests are submitted again"
            )
            emit(Noticed(text))
            batch = replace(batch, expected=batch.at + WINDOW_SECONDS)
        else:
            batch = replace(batch, id=remote.id, expected=remote.expires_at)
            sent = f"{len(left):,} requests to {batch.model} as batch {batch.name} ({batch.id})"
            emit(Noticed(f"{self.location}: submitted {sent}", False))
        self.folder.write(batch)

    def _taken(self, without: str = "") -> Set[str]:
        """The digests of requests in batches whose answers no worker of this run has seen."""
        names = [each.name for each in self._unseen() if each.name != without]
        return frozenset().union(*map(self._digests, names))

    def _read_digests(self, name: str) -> Set[str]:
        return frozenset(digests_of(self.folder.path, name))

    def _unseen(self) -> list[ProviderBatch]:
        """Read the batches that had not ended when the run began."""
        return [each for each in self.folder.batches() if each.name not in self._seen]

    def _add_waiting(self, keys: Sequence[Key], stages: Sequence[str]) -> None:
        """Record that partitions wait for batches: for all, where it is not known for which."""
        unseen = self._unseen()
        others = {key for each in unseen for key in each.partitions}
        for batch in unseen:
            own = [key for key in keys if key in batch.partitions or key not in others]
            wider = replace(
                batch,
                partitions=tuple(dict.fromkeys((*batch.partitions, *own))),
                stages=tuple(dict.fromkeys((*batch.stages, *(stages if own else ())))),
            )
            if wider != batch:
                self.folder.write(wider)
        self.read()

    def expected(self, key: Key) -> float:
        """Return the Unix time by which the batches that a partition waits for have ended."""
        return max((b.expected for b in self.in_flight if key in b.partitions), default=0.0)


def stage_batches(
    pipeline: Pipeline, store: Store, stages: Collection[str] | None = None
) -> list[StageBatches]:
    """Return the batches of the stages that use them, of some stages or all."""
    return [
        StageBatches(store, pipeline.name, stage.spec)
        for stage in pipeline
        if (stages is None or stage.name in stages)
        and stage.spec.runs_udf
        and stage.spec.in_batches
    ]


def _is_of(api: BatchApi, remote: RemoteBatch, batch: ProviderBatch) -> bool:
    """Whether a batch of the provider is that of a record."""
    if remote.name is not None:
        return remote.name == batch.name
    if remote.requests != batch.requests:
        return False
    first = next(api.answers(remote), None)
    return first is not None and first.custom_id.endswith(batch.name)


def _name() -> str:
    return secrets.token_hex(8)


def _custom_id(digest: str, name: str) -> str:
    return f"{digest}-{name}"


def grouped(
    requests: Iterable[tuple[Key, str, str]], overhead: int, max_requests: int, max_bytes: int
) -> Iterator[tuple[dict[str, str], list[Key]]]:
    """Divide requests into batches, each with the partitions that wait for it.

    Equal requests are sent once. `overhead` is the number of bytes of a request besides its body.
    """
    seen: set[str] = set()
    group: dict[str, str] = {}
    keys: dict[Key, None] = {}
    size = 0
    for key, digest, body in requests:
        if digest in seen and digest not in group:
            continue  # in an earlier one, which the partition waits for too
        length = 0 if digest in group else len(body.encode()) + overhead
        if group and (len(group) + bool(length) > max_requests or size + length > max_bytes):
            yield group, list(keys)
            group, keys, size = {}, {}, 0
        seen.add(digest)
        group[digest] = body
        keys[key] = None
        size += length
    if group:
        yield group, list(keys)


def answers_by_digest(
    digests: Collection[str], batch_answers: Iterable[BatchAnswer]
) -> dict[str, BatchAnswer]:
    """Return the answers to some requests; of several to one, one that succeeded."""
    wanted, answers = set(digests), dict[str, BatchAnswer]()
    for each in batch_answers:
        digest = each.custom_id[:DIGEST_LENGTH]
        former = answers.get(digest)
        if digest in wanted and (former is None or former.status != "succeeded"):
            answers[digest] = each
    return answers


def lost_answer(remote: RemoteBatch, now: float, others: bool) -> BatchAnswer:
    """Return what stands for the answers that a batch has not brought back."""
    if remote.lacks_room and others:
        return BatchAnswer("", POSTPONED)
    if remote.problem:
        return BatchAnswer("", "errored", f"the batch failed: {remote.problem}")
    if remote.is_canceled:
        return BatchAnswer("", "canceled")
    if now >= remote.expires_at:
        return BatchAnswer("", "expired")
    return BatchAnswer("", "errored", "the batch has ended without an answer")
