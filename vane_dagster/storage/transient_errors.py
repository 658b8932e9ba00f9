"""Errors that may pass, of any library, and operations that are tried again after them."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")

_INITIAL_BACKOFF = 1.0
_MAX_BACKOFF = 60.0
_ATTEMPTS = 4
_INITIAL_STORAGE_BACKOFF = 0.5

TRANSIENT = frozenset(
    {
        "ConnectionError",
        "TimeoutError",
        "IncompleteRead",
        "RemoteDisconnected",
        "APIConnectionError",
        "APITimeoutError",
        "ConnectError",
        "ConnectTimeout",
        "ReadError",
        "ReadTimeout",
        "RemoteProtocolError",
        "ServerDisconnectedError",
        "ClientConnectionError",
        "EndpointConnectionError",
        "ProtocolError",
        "HTTPClientError",
        "ResponseParserError",
        "ClientPayloadError",
        "ServiceRequestError",
        "ServiceResponseError",
    }
)
"""Names of classes, of any library, whose errors may pass: the class itself or one of its bases."""
TRANSIENT_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_TRANSIENT_CODES = frozenset(
    {
        "SlowDown",
        "ServiceUnavailable",
        "InternalError",
        "RequestTimeout",
        "IncompleteBody",
        "BadDigest",
        "Throttling",
        "ThrottlingException",
        "XAmzContentSHA256Mismatch",
    }
)
"""What an object store calls such errors, some of them under the status of a bad request."""


def is_transient(error: BaseException, names: tuple[str, ...] = ()) -> bool:
    """Whether an error may pass: of a connection, a time-out, or a busy or failing server."""
    if _code_of(error) in _TRANSIENT_CODES:
        return True
    status = http_status(error)
    if status is not None:
        return status in TRANSIENT_STATUS
    return bool(class_names(error) & (TRANSIENT | set(names)))


def http_status(error: BaseException) -> int | None:
    """The HTTP status that an error carries, as libraries put it there."""
    response = getattr(error, "response", None)
    for holder in (error, response):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if type(value) is int and 100 <= value < 600:
                return value
    if isinstance(response, Mapping):  # of botocore
        value = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        return value if type(value) is int else None
    return None


def _code_of(error: BaseException) -> str | None:
    """The code by which an object store calls an error."""
    response = getattr(error, "response", None)
    found = response.get("Error") if isinstance(response, Mapping) else None
    return str(found.get("Code")) if isinstance(found, Mapping) else None


def backoff_seconds(error: BaseException, attempt: int, first: float = _INITIAL_BACKOFF) -> float:
    """Seconds to wait: what the server asks for, else exponentially more, with jitter."""
    headers: Any = getattr(getattr(error, "response", error), "headers", None) or {}
    try:
        asked = headers.get("retry-after") or headers.get("Retry-After")
        return min(_MAX_BACKOFF, max(0.0, float(asked)))
    except (AttributeError, TypeError, ValueError):
        pass  # a date, or nothing
    longest = min(_MAX_BACKOFF, first * 2 ** (attempt - 1))
    return random.uniform(longest / 2, longest)


def class_names(error: BaseException) -> set[str]:
    """The names of an error's class and its bases."""
    kinds = type(error).__mro__
    return {kind.__name__ for kind in kinds} | {kind.__qualname__ for kind in kinds}


def is_transient_storage_error(error: BaseException) -> bool:
    """Whether an error of a file system, or what its driver made it from, may pass."""
    return any(is_transient(found) for found in _causes(error))


def with_retries(action: Callable[[], _T]) -> _T:
    """What an operation on storage gives, which is tried again while its error may pass.

    Drivers try again on their own too, some of them, and not after every such error.
    """
    for attempt in range(1, _ATTEMPTS):
        try:
            return action()
        except Exception as error:  # drivers have exceptions of their own, of many kinds
            if not is_transient_storage_error(error):
                raise
            time.sleep(backoff_seconds(error, attempt, _INITIAL_STORAGE_BACKOFF))
    return action()


def advice(error: Exception) -> str:
    """What can be done about an error of a file system."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return (
            "The disk is full: make room there, or have the store elsewhere, and run again; what "
            "is finished is kept"
        )
    if number == errno.EFBIG:
        return "A file may not be that large there: raise the limit, or set fewer fragment_rows"
    if isinstance(error, PermissionError) or number == errno.EROFS:
        return (
            "Permission is denied: give the user or the credentials of this process the right to "
            "read and write there, or have the store elsewhere"
        )
    if is_transient_storage_error(error):
        return "It was tried several times; run again when the storage answers"
    return "Check that it exists, that the credentials reach it and that there is room"


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__
