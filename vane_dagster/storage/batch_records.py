"""Batches of a provider, as records of the store: work that outlives a run.

``<root>/<pipeline>/<stage>/batches/`` has for each batch ``<name>.json``, the record; beside it
``<name>.requests.parquet`` until the batch has ended, then ``<name>.answers.parquet``. The worker
that needs an answer records its request in ``asked-<random>.parquet``, from where it is moved into
a batch.

A record is written before the provider is called: until it has the provider's id, it is not known
whether there is such a batch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from vane_dagster.errors import DamagedPartError
from vane_dagster.providers.batch_api import BatchAnswer
from vane_dagster.storage.codec import UNRECORDED, Codec, read_file
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.part_file import encoded, read_part
from vane_dagster.storage.store import Store

BATCHES = "batches"
"""The folder of a stage's batches, in the stage's."""
RECORD, REQUESTS, ANSWERS = ".json", ".requests.parquet", ".answers.parquet"
ASKED = "asked-"
ROW_GROUP = 500
"""Answers that a worker reads at a time; they are in the order of the rows."""
_CHARACTERS_A_TOKEN = 4
_TYPICAL_TOKENS = 500
"""Tokens of an answer without a limit."""
_MEDIUM = re.compile(r'"(data:[^",]*,)?[A-Za-z0-9+/]{500,}=*"')
"""An image or a document in a request, as base64."""
_MEDIUM_TOKENS = 1_000


@dataclass(frozen=True)
class ProviderBatch:
    """A batch of requests of one stage.

    Attributes:
        model: The model, as the provider knows it.
        at: Unix time at which it was recorded, before the provider was called.
        run_id: The run.
        requests: The number of its requests.
        partitions: The partitions that wait for it.
        stages: The stages that wait for it in these partitions.
        force: Whether the run computed everything again.
        retry_quarantined: Whether the run computed rows again that had failed.
        id: The provider's id; empty while it is not known whether there is such a batch.
        expected: Unix time by which it has ended.
        is_canceled: Whether it was cancelled.
        ended_at: Unix time at which its answers were stored; 0 before.
        counts: The number of its answers by their status.
        name: Its name, which the provider has too; not recorded.
    """

    model: str
    at: float
    run_id: str
    requests: int
    partitions: tuple[str | None, ...]
    stages: tuple[str, ...]
    force: bool = False
    retry_quarantined: bool = False
    id: str = ""
    expected: float = 0.0
    is_canceled: bool = False
    ended_at: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)
    name: str = field(default="", metadata=UNRECORDED)

    @property
    def state(self) -> str:
        """Its state, for people."""
        if self.ended_at:
            return "ended"
        if not self.id:
            return "in doubt"
        return "cancelling" if self.is_canceled else "submitted"


_CODEC = Codec(ProviderBatch)


@dataclass(frozen=True)
class Recorded:
    """Requests that a worker has recorded.

    Attributes:
        name: The name of their file; empty if all were in flight already.
        requests: The number of recorded requests.
        prompt_tokens: About the tokens of the recorded messages.
        completion_tokens: About the tokens of their answers, by their ``max_tokens``.
    """

    name: str = ""
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class BatchFolder:
    """The batches of a stage in a store."""

    def __init__(self, store: Store, pipeline: str, stage: str) -> None:
        self.path = store.root.child(pipeline, stage, BATCHES)

    def batches(self) -> list[ProviderBatch]:
        """Read the records, the earliest first."""
        files = [name for name in self.path.names() if name.endswith(RECORD)]
        records = filter(None, in_threads(self._read, files))
        return sorted(records, key=lambda each: (each.at, each.name))

    def _read(self, file: str) -> ProviderBatch | None:
        fix = "Restore it; if it is deleted, its requests may be sent again"
        load = functools.partial(_CODEC.load, name=file.removesuffix(RECORD))
        return read_file(self.path, file, load, fix)

    def write(self, batch: ProviderBatch) -> None:
        """Write a record; what other processes have recorded since it was read stays."""
        file = f"{batch.name}{RECORD}"
        if (stored := self._read(file)) is not None:
            partitions = dict.fromkeys((*stored.partitions, *batch.partitions))
            stages = dict.fromkeys((*stored.stages, *batch.stages))
            newest = stored if stored.ended_at and not batch.ended_at else batch
            id = newest.id or stored.id
            batch = replace(newest, partitions=(*partitions,), stages=(*stages,), id=id)
        self.path.write(file, _CODEC.dumps(batch))

    def add(self, batch: ProviderBatch, requests: Mapping[str, str]) -> None:
        """Write a new record and its requests, by digest."""
        self.path.write(f"{batch.name}{REQUESTS}", _requests_file(requests))
        self.write(batch)

    def drop(self, batch: ProviderBatch) -> None:
        """Delete a record of which there is no batch."""
        self.path.delete([f"{batch.name}{RECORD}", f"{batch.name}{REQUESTS}"])

    def end(self, batch: ProviderBatch, answers: Mapping[str, BatchAnswer]) -> None:
        """Store the answers of a batch, in the order of its requests, then its record."""
        digests = digests_of(self.path, batch.name)
        given = [(digest, answers[digest]) for digest in digests if digest in answers]
        columns = {
            "digest": pa.array([digest for digest, _ in given], pa.string()),
            "status": pa.array([each.status for _, each in given], pa.string()),
            "code": pa.array([each.code for _, each in given], pa.int32()),
            "text": pa.array([each.text for _, each in given], pa.large_string()),
        }
        self.path.write(f"{batch.name}{ANSWERS}", _parquet(columns))
        self.write(batch)
        self.path.delete([f"{batch.name}{REQUESTS}"])

    def asked(self, names: Iterable[str]) -> Mapping[str, str]:
        """Read what workers have recorded: the bodies of requests, by digest."""
        tables = in_threads(functools.partial(read_part, self.path), names)
        columns = [(t.column("digest").to_pylist(), t.column("body").to_pylist()) for t in tables]
        return {digest: body for given in columns for digest, body in zip(*given)}

    def forget(self, names: Sequence[str]) -> None:
        """Delete what workers have recorded, once it is in batches."""
        self.path.delete([*names])


def record_requests(folder: StoragePath, requests: Mapping[str, str]) -> Recorded:
    """Write the bodies of requests by digest, in a worker."""
    if not requests:
        return Recorded()
    name = f"{ASKED}{secrets.token_hex(16)}.parquet"  # that of this call: its run deletes it
    folder.write(name, _requests_file(requests))
    texts, media = zip(*(_MEDIUM.subn("", body) for body in requests.values()))
    bodies = [json.loads(body) for body in requests.values()]
    limits = [body.get("max_tokens") or body.get("max_completion_tokens") for body in bodies]
    return Recorded(
        name,
        len(requests),
        sum(map(len, texts)) // _CHARACTERS_A_TOKEN + sum(media) * _MEDIUM_TOKENS,
        sum(limit if isinstance(limit, int) else _TYPICAL_TOKENS for limit in limits),
    )


def digests_in(folder: StoragePath, name: str) -> list[str]:
    """Read the digests in a file of requests or answers."""
    digests: list[str] = read_part(folder, name, ["digest"])["digest"].to_pylist()
    return digests


def digests_of(folder: StoragePath, batch: str) -> list[str]:
    """Read the digests of a batch's requests; return none if the batch does not exist."""
    for suffix in (REQUESTS, ANSWERS):  # another process may have ended or dropped it
        with contextlib.suppress(DamagedPartError):
            return digests_in(folder, f"{batch}{suffix}")
    return []


def _requests_file(requests: Mapping[str, str]) -> memoryview:
    columns = {
        "digest": pa.array(list(requests), pa.string()),
        "body": pa.array(list(requests.values()), pa.large_string()),
    }
    return _parquet(columns)


def _parquet(columns: Mapping[str, pa.Array]) -> memoryview:
    return encoded(pa.table(columns), compression="zstd", row_group_size=ROW_GROUP)
