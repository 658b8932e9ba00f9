"""Secrets, recognized by name and masked in every text that the package produces.

Secrets in storage options, forwarded variables, arguments and the environment are registered in the
process that reads them. From then on `masked` replaces them with ``***``. Values shorter than six
characters are not masked by value.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from urllib.parse import quote

MASK = "***"
_SHORTEST = 6
_NAMED = (
    r"secret|passw(or)?d|passphrase|credential|api_?key|access_?key|private_?key|account_?key"
    r"|connection_?string|authorization|(^|_)token$|(^|_)sas(_token)?$"
    r"|(^|_)(auth|bearer|pwd|(set_)?cookie)$"
)
_NAMED_OPTION = _NAMED + r"|token|signature|key$"
_SEPARATOR = re.compile(r"[\-. ]+|(?<=[a-z0-9])(?=[A-Z])")
_PLAIN = re.compile(
    r"(^|_)(type|uri|url|file)$|^(quota_)?project(_id)?$|client_email|^universe_domain$"
)
_NAME_OF_VARIABLE = re.compile(r"_env(_var)?$")
_USER_INFO = re.compile(
    r"\b(?P<protocol>[A-Za-z][A-Za-z0-9+.\-]*)://(?:[^\s/@:'\"?#]*:[^\s/@'\"]*"
    r"|(?<=s3://|3a://)[^\s/@:'\"]+:[^\s@'\"]+"
    r"|(?<=http://|ttps://)[^\s/@:'\"?#]+)@"
)
_SIGNED = re.compile(
    r"([?&](?:sig|signature|token|access_token|api[_-]?key|X-Amz-Signature|X-Amz-Security-Token"
    r"|X-Goog-Signature)=)[^&\s'\"]+",
    re.IGNORECASE,
)

_lock = threading.Lock()
_known: set[str] = set()
_pattern: re.Pattern[str] | None = None


def keep(values: Iterable[str]) -> None:
    """Register values to be masked from now on, regardless of their names."""
    global _pattern
    fresh = {value for value in values if len(value) >= _SHORTEST and value not in _known}
    if not fresh:
        return
    with _lock:
        _known.update(form for value in fresh for form in _forms(value))
        longest_first = sorted(_known, key=len, reverse=True)
        _pattern = re.compile("|".join(map(re.escape, longest_first)))


def keep_options(options: Mapping[str, Any]) -> None:
    """Register the secrets among a file system's options."""
    keep(_secrets(options, _NAMED_OPTION, False))


def keep_variables(variables: Mapping[str, str]) -> None:
    """Register the values of environment variables, except paths of existing files."""
    keep(value for value in variables.values() if not os.path.exists(value))


def keep_arguments(*values: Any) -> None:
    """Register the secrets among a function's arguments: by name, or wrapped in `SecretStr`."""
    keep(secret for value in values for secret in _secrets(value, _NAMED, False))


def masked(text: str) -> str:
    """Replace secrets in a text with ``***``: registered ones, and those of URLs and variables."""
    keep(
        value
        for name in os.environ
        if _marks(name, _NAMED) and (value := os.environ.get(name, "")) not in _known
        if len(value) >= _SHORTEST and not value.isdigit() and not os.path.exists(value)
    )
    if _pattern is not None:
        text = _pattern.sub(MASK, text)
    return _SIGNED.sub(rf"\g<1>{MASK}", _USER_INFO.sub(rf"\g<protocol>://{MASK}@", text))


def without_secrets(error: BaseException) -> BaseException:
    """Return the error, replaced by a masked copy if it or one of its causes contains a secret.

    Causes are masked too because Dagster logs them.
    """
    cause, context = error.__cause__, error.__context__
    if cause is not None:
        error.__cause__ = without_secrets(cause)
    elif context is not None and not error.__suppress_context__:
        error.__context__ = without_secrets(context)
    text = str(error)
    shown = masked(text)
    if shown == text and masked(repr(error)) == repr(error):
        return error
    kind = type(error)
    made: BaseException
    if kind.__module__ == "builtins" and isinstance(error, OSError):
        made = kind(shown)
    else:
        made = RuntimeError(f"{kind.__name__}: {shown}")
    made.__cause__ = error.__cause__
    made.__suppress_context__ = True
    return made.with_traceback(error.__traceback__)


@contextmanager
def errors_masked() -> Iterator[None]:
    """Mask secrets in exceptions raised inside the block, and in their causes."""
    try:
        yield
    except Exception as error:
        made = without_secrets(error)
        if made is error:
            raise
        raise made from made.__cause__


def holds_secret(url: str) -> bool:
    """Return whether a URL holds a password or a signature."""
    return (_USER_INFO.match(url) or _SIGNED.search(url)) is not None


def revealed(value: Any) -> Any:
    """Unwrap the options for a file system: each pydantic `SecretStr` becomes its plain value."""
    if is_wrapped(value):
        return value.get_secret_value()
    if isinstance(value, Mapping):
        return {name: revealed(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(revealed, value))
    return value


def is_wrapped(value: Any) -> bool:
    """Return whether a value is a pydantic `SecretStr` or `SecretBytes`."""
    kinds = (kind.__module__.partition(".")[0] for kind in type(value).__mro__)
    return "pydantic" in kinds and callable(getattr(value, "get_secret_value", None))


def marks_secret(name: str, named: str = _NAMED) -> bool:
    """Return whether the value of that name is a secret, not the variable that has it."""
    return _marks(name, named) and not _NAME_OF_VARIABLE.search(_SEPARATOR.sub("_", name))


@lru_cache(maxsize=4096)
def _marks(name: str, named: str) -> bool:
    """Return whether a name marks secrets, with ``_``, ``-``, ``.`` or case between its words."""
    return re.search(named, _SEPARATOR.sub("_", name), re.IGNORECASE) is not None


def _secrets(value: Any, named: str, secret: bool) -> Iterator[str]:
    """Yield the secrets in a value: wrapped values, and those under a name that marks secrets."""
    if is_wrapped(value):
        yield from _secrets(value.get_secret_value(), named, True)
    elif isinstance(value, str):
        if secret and not (len(value) < 4096 and "\0" not in value and os.path.exists(value)):
            yield value
    elif isinstance(value, bytes):
        if secret:
            yield value.decode(errors="ignore")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            is_secret = secret and not _PLAIN.search(str(name))
            yield from _secrets(item, named, is_secret or marks_secret(str(name), named))
    elif isinstance(value, Sequence):
        for item in value:
            yield from _secrets(item, named, secret)
    elif hasattr(type(value), "model_fields") or hasattr(type(value), "__dataclass_fields__"):
        yield from _secrets(dict(getattr(value, "__dict__", {})), named, secret)


def _forms(value: str) -> set[str]:
    """Return the forms in which a value may occur in a text: plain, escaped, and URL-quoted."""
    return {value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(value), quote(value, safe="")}
