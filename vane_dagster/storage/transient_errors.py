"""Transient errors of any library, and retries after them."""

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
        "ChunkedEncodingError",
        "URLError",
        "MaxRetryError",
        "WriteError",
        "WriteTimeout",
        "PoolTimeout",
    }
)
"""Names of transient error classes of any library: the error's own class or one of its bases."""
TRANSIENT_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, *range(520, 525), 529})
"""Those above 511 are not standard: of proxies, and some servers have 529 for an overload."""
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
"""Codes of transient errors of object stores, some of them with the status of a bad request."""


def is_transient(error: BaseException, names: tuple[str, ...] = ()) -> bool:
    """Return whether an error is transient: of a connection, a time-out, or a busy server.

    So is one of the classes that the user names, whatever its status.
    """
    if _code_of(error) in _TRANSIENT_CODES or class_names(error) & set(names):
        return True
    status = http_status(error)
    if status is not None:
        return status in TRANSIENT_STATUS
    return bool(class_names(error) & TRANSIENT)


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error, from the attributes that libraries use for it."""
    response = getattr(error, "response", None)
    for holder in (error, response):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if type(value) is int and 100 <= value < 600:
                return value
    if isinstance(response, Mapping):  # from botocore
        value = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        return value if type(value) is int else None
    return None


def _code_of(error: BaseException) -> str | None:
    """Return the object store's code of an error."""
    response = getattr(error, "response", None)
    found = response.get("Error") if isinstance(response, Mapping) else None
    return str(found.get("Code")) if isinstance(found, Mapping) else None


def backoff_seconds(error: BaseException, attempt: int, first: float = _INITIAL_BACKOFF) -> float:
    """Return the seconds to wait: as the server asks, else exponential backoff with jitter."""
    headers: Any = getattr(getattr(error, "response", error), "headers", None) or {}
    try:
        asked = headers.get("retry-after") or headers.get("Retry-After")
        return min(_MAX_BACKOFF, max(0.0, float(asked)))
    except (AttributeError, TypeError, ValueError):
        pass  # a date, or nothing
    longest = min(_MAX_BACKOFF, first * 2 ** (attempt - 1))
    return random.uniform(longest / 2, longest)


def class_names(error: BaseException) -> set[str]:
    """Return the names of an error's class and its bases."""
    kinds = type(error).__mro__
    return {kind.__name__ for kind in kinds} | {kind.__qualname__ for kind in kinds}


def is_transient_storage_error(error: BaseException) -> bool:
    """Return whether an error of a file system, or one of its causes, is transient."""
    return any(is_transient(found) for found in _causes(error))


def has_status(error: BaseException, status: int) -> bool:
    """Return whether an error of a file system, or one of its causes, has an HTTP status."""
    return any(http_status(found) == status for found in _causes(error))


def with_retries(action: Callable[[], _T]) -> _T:
    """Run an operation on storage, and retry it after transient errors.

    Some drivers also retry on their own, but not after every transient error.
    """
    for attempt in range(1, _ATTEMPTS):
        try:
            return action()
        except Exception as error:  # drivers raise their own exception classes
            if not is_transient_storage_error(error):
                raise
            time.sleep(backoff_seconds(error, attempt, _INITIAL_STORAGE_BACKOFF))
    return action()


def advice(error: Exception) -> str:
    """Say what the user can do about an error of a file system."""
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
