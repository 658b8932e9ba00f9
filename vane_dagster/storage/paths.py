"""Folders of partitions: whatever a key holds, never outside their parent, never two in one."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable

PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
"""A place in a URL for the partition's key, or for one dimension of it."""
UNPARTITIONED = "~unpartitioned"
_PLAIN = re.compile(r"[a-z0-9_=][a-z0-9_=.\-]{0,99}")
_PRESENTABLE = re.compile(r"[\w=@+\-][\w=@+\-.,:;| ]*")
_MOST_BYTES = 200


def partition_folder(key: str | None) -> str:
    """The store's folder of a partition: its key where that is a safe name everywhere.

    Else a digest of the key, also where a file system that ignores case would confuse it.
    """
    if key is None:
        return UNPARTITIONED
    return key if _PLAIN.fullmatch(key) else _digested(key)


def published_folder(key: str) -> str:
    """A partition's key as it stands in the URL of a published folder.

    It is one name, so that no key leads elsewhere; one that Parquet's readers don't pass over; and
    any two keys have two.
    """
    presentable = (
        _PRESENTABLE.fullmatch(key)
        and not key.startswith("_")
        and key.rstrip(" .") == key
        and len(key.encode()) <= _MOST_BYTES
        and unicodedata.is_normalized("NFC", key)
    )
    return key if presentable else _digested(key)


def placeholders(url: str) -> tuple[str, ...]:
    """The names of a URL's placeholders, as "partition_key"."""
    return tuple(PLACEHOLDER.findall(url))


def fill_placeholders(url: str, key: str | None, escape: Callable[[str], str] = str) -> str:
    """A URL with a partition's key in place of its placeholders.

    Args:
        url: The URL, with ``{partition_key}`` or ``{partition_key.<dimension>}``.
        key: The partition's key, which has one for each dimension where it is a multi-partition's.
        escape: Makes the text that stands in the URL.
    """

    def value(match: re.Match[str]) -> str:
        dimension = match.group(1).partition(".")[2]
        keys = getattr(key, "keys_by_dimension", {})
        return escape(keys[dimension] if dimension else str(key))

    return PLACEHOLDER.sub(value, url)


def _digested(key: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9\-]+", "-", key)[:40].strip("-") or "key"
    return f"{readable}~{hashlib.sha256(key.encode()).hexdigest()[:20]}"
