"""The batch APIs of OpenAI and Anthropic: requests answered within a day, at half the price.

A batch has a name of ours. OpenAI's batches carry it in their metadata. Anthropic's carry nothing,
so it is in the ``custom_id`` of each request, which is shown once the batch has ended.
"""

from __future__ import annotations

import abc
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vane_dagster.errors import ComputeError, described
from vane_dagster.retries import has_status

WINDOW_SECONDS = 24 * 3600.0
"""A batch that has not ended by then expires."""
POSTPONED = "postponed"
PRICE = 0.5
"""Price of a token in a batch, as a share of its price."""
DIGEST_LENGTH = 32
"""Hex digits that identify a request; the beginning of its ``custom_id``."""
_NAME = "vane_dagster"
_EXPIRED = "batch_expired"
_CANCELED = "batch_cancelled"


@dataclass(frozen=True)
class RemoteBatch:
    """A batch, as its provider knows it.

    Attributes:
        id: The provider's id.
        created_at: Unix time in seconds.
        expires_at: Unix time in seconds, by which it has ended.
        has_ended: Whether no request is processed any more.
        requests: The number of its requests; 0 while that is not known.
        name: Our name; None if only its answers have it.
        is_canceled: Whether somebody cancelled it.
        problem: Why it failed as a whole; empty if it did not.
        lacks_room: Whether it failed because the account may have no more in batches.
        files: The provider's ids or URLs of the files with its answers.
    """

    id: str
    created_at: float
    expires_at: float
    has_ended: bool
    requests: int
    name: str | None = None
    is_canceled: bool = False
    problem: str = ""
    lacks_room: bool = False
    files: Sequence[str] = field(default=(), repr=False)


@dataclass(frozen=True)
class BatchAnswer:
    """What a batch has brought back for a request.

    Attributes:
        custom_id: The id that the request was sent with.
        status: "succeeded", "errored", "expired", "canceled", or `POSTPONED`, if the account could
            have no more in batches.
        text: The response's body as JSON, or the message of the error.
        code: The HTTP status of an error; 0 if there is none.
    """

    custom_id: str
    status: str
    text: str = ""
    code: int = 0


class RefusedBatch(ComputeError):
    """The provider has refused to create a batch, so there is none."""


class Pending(Exception):
    """A request that has no answer yet.

    Attributes:
        requests: The request to record, its body by its digest; empty if it is in flight.
    """

    def __init__(self, digest: str = "", body: str = "") -> None:
        super().__init__("the answer of a batch is pending")
        self.requests = {digest: body} if digest else {}


class BatchRequestError(ValueError):
    """A request has failed in a batch, or so often that it is not sent again."""


class BatchApi(abc.ABC):
    """The batch API of a provider. The driver calls it, with the provider's synchronous client."""

    MAX_REQUESTS: ClassVar[int]
    MAX_BYTES: ClassVar[int]

    def __init__(self, client: Any, path: str) -> None:
        self._client, self._path = client, path

    @property
    @abc.abstractmethod
    def _batches(self) -> Any:
        """The client's methods for batches."""

    @abc.abstractmethod
    def _remote(self, batch: Any) -> RemoteBatch:
        """Return a batch of the client."""

    @abc.abstractmethod
    def line(self, custom_id: str, body: str) -> bytes:
        """Return a request as it is sent, on one line."""

    @abc.abstractmethod
    def submit(self, name: str, lines: Sequence[bytes]) -> RemoteBatch:
        """Create a batch.

        Raises:
            RefusedBatch: If the provider refuses it.
            ComputeError: If it is not known whether the batch was created.
        """

    def since(self, at: float) -> Iterator[RemoteBatch]:
        """Yield all batches of the account that were created since a Unix time."""
        with self._calling("batches were not listed"):
            for each in map(self._remote, self._batches.list(limit=100)):  # the newest first
                if each.created_at < at:
                    return
                yield each

    def get(self, id: str) -> RemoteBatch:
        """Return a batch."""
        with self._calling(f"batch {id} was not read"):
            return self._remote(self._batches.retrieve(id))

    @abc.abstractmethod
    def answers(self, batch: RemoteBatch) -> Iterator[BatchAnswer]:
        """Yield the answers of a batch that has ended, in any order, some perhaps twice."""

    def cancel(self, id: str) -> None:
        """Ask the provider to end a batch early. Answers that it has by then are kept."""
        with self._calling(f"batch {id} was not cancelled"):
            self._batches.cancel(id)

    def close(self) -> None:
        """Close the client's connections."""
        self._client.close()

    @contextmanager
    def _calling(self, what: str, creates: bool = False) -> Iterator[None]:
        """Turn errors of the client into ours; `creates` is a call that may make a batch."""
        try:
            yield
        except Exception as error:  # of the client, of its transport, or of a malformed response
            status = getattr(error, "status_code", None)
            is_refused = status is not None and status < 500 and status not in (408, 409)
            kind = RefusedBatch if creates and is_refused else ComputeError
            where = getattr(getattr(error, "request", None), "url", "the provider")
            cause = described(error.__cause__ or error)
            raise kind(f"{what} by {where}: {cause}") from error


class OpenAIBatches(BatchApi):
    """A file of JSON lines is uploaded, and a batch created from it."""

    MAX_REQUESTS, MAX_BYTES = 50_000, 200_000_000

    @property
    def _batches(self) -> Any:
        """See `BatchApi`."""
        return self._client.batches

    def _remote(self, batch: Any) -> RemoteBatch:
        """See `BatchApi`."""
        problems = (batch.errors.data or ()) if batch.errors else ()
        problem = "; ".join(str(each.message) for each in problems)
        return RemoteBatch(
            batch.id,
            float(batch.created_at),
            float(batch.expires_at or batch.created_at + WINDOW_SECONDS),
            batch.status in ("failed", "completed", "expired", "cancelled"),
            batch.request_counts.total if batch.request_counts else 0,
            (batch.metadata or {}).get(_NAME, ""),
            batch.status in ("cancelling", "cancelled"),
            (problem or "no reason was given") if batch.status == "failed" else "",
            any(each.code == "token_limit_exceeded" for each in problems),
            [id for id in (batch.output_file_id, batch.error_file_id) if id],
        )

    def line(self, custom_id: str, body: str) -> bytes:
        """See `BatchApi`."""
        head = {"custom_id": custom_id, "method": "POST", "url": f"/v1{self._path}"}
        return f'{json.dumps(head)[:-1]}, "body": {body}}}'.encode()

    def submit(self, name: str, lines: Sequence[bytes]) -> RemoteBatch:
        """See `BatchApi`. A file without a batch, of a process that was killed, expires.

        The upload is repeated after a transient error, since it makes no batch.
        """
        data = (f"{name}.jsonl", b"\n".join(lines))
        try:
            with self._calling("a file of requests was not accepted"):
                file = self._client.files.create(file=data, purpose="batch")
        except ComputeError as error:
            raise RefusedBatch(str(error)) from error
        with self._calling("a batch was not created", creates=True):
            made = self._client.with_options(max_retries=0).batches.create(
                input_file_id=file.id,
                endpoint=f"/v1{self._path}",
                completion_window="24h",
                metadata={_NAME: name},
            )
        return self._remote(made)

    def answers(self, batch: RemoteBatch) -> Iterator[BatchAnswer]:
        """See `BatchApi`."""
        for id in batch.files:
            try:
                with self._calling(f"answers of batch {batch.id} were not read"):
                    data = self._client.files.content(id).content
            except ComputeError as error:
                if not has_status(error, 404):
                    raise
                continue  # the provider keeps files for 30 days
            for line in filter(None, data.split(b"\n")):
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    yield _answer(json.loads(line))  # of a malformed line, the request is lost


def _answer(record: Any) -> BatchAnswer:
    """Return what a line of a file of OpenAI says."""
    response, error = record.get("response") or {}, record.get("error") or {}
    code, custom_id = int(response.get("status_code") or 0), str(record["custom_id"])
    if code == 200 and not error:
        return BatchAnswer(custom_id, "succeeded", json.dumps(response["body"]))
    status = {_EXPIRED: "expired", _CANCELED: "canceled"}.get(str(error.get("code")), "errored")
    body = response.get("body")
    inner = body.get("error") if isinstance(body, Mapping) else None
    text = error.get("message") or (inner or {}).get("message") or str(body)
    return BatchAnswer(custom_id, status, str(text), code)


class AnthropicBatches(BatchApi):
    """A batch is created by one call with all its requests."""

    MAX_REQUESTS, MAX_BYTES = 100_000, 256_000_000

    @property
    def _batches(self) -> Any:
        """See `BatchApi`."""
        return self._client.messages.batches

    def _remote(self, batch: Any) -> RemoteBatch:
        """See `BatchApi`."""
        return RemoteBatch(
            batch.id,
            batch.created_at.timestamp(),
            batch.expires_at.timestamp(),
            batch.processing_status == "ended",
            sum(dict(batch.request_counts).values()),
            is_canceled=batch.cancel_initiated_at is not None,
            files=[batch.results_url] if batch.results_url else (),
        )

    def line(self, custom_id: str, body: str) -> bytes:
        """See `BatchApi`."""
        return f'{{"custom_id": {json.dumps(custom_id)}, "params": {body}}}'.encode()

    def submit(self, name: str, lines: Sequence[bytes]) -> RemoteBatch:
        """See `BatchApi`."""
        client = self._client.with_options(max_retries=0)
        with self._calling("a batch was not created", creates=True):
            requests = [json.loads(line) for line in lines]
            return self._remote(client.messages.batches.create(requests=requests))

    def answers(self, batch: RemoteBatch) -> Iterator[BatchAnswer]:
        """See `BatchApi`. The provider keeps results for 29 days."""
        with self._calling(f"answers of batch {batch.id} were not read"):
            for each in self._client.messages.batches.results(batch.id) if batch.files else ():
                result = each.result
                if result.type == "succeeded":
                    text = json.dumps(result.message.to_dict(mode="json"))
                    yield BatchAnswer(each.custom_id, "succeeded", text)
                elif result.type == "errored":
                    error = result.error.error
                    code = _STATUS.get(error.type, 0)
                    text = f"{error.type}: {error.message}"
                    yield BatchAnswer(each.custom_id, "errored", text, code)
                else:
                    yield BatchAnswer(each.custom_id, result.type)


_STATUS = {"invalid_request_error": 400, "permission_error": 403, "request_too_large": 413}
"""The HTTP status of the errors of Anthropic's API that would come again; see `BatchAnswers`."""
