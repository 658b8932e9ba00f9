"""Folder names of partitions: safe for any key, and different for different keys."""

from __future__ import annotations

import hashlib
import re
import unicodedata

UNPARTITIONED = "~unpartitioned"
_PLAIN = re.compile(r"[a-z0-9_=][a-z0-9_=.\-]{0,99}")
_PRESENTABLE = re.compile(r"[\w=@+\-][\w=@+\-.,:;| ]*")
_MAX_BYTES = 200


def partition_folder(key: str | None) -> str:
    """Return the store's folder of a partition: its key if that is a safe name everywhere.

    Other keys become a digest, including those that a case-insensitive file system would confuse.
    """
    if key is None:
        return UNPARTITIONED
    return key if _PLAIN.fullmatch(key) else _digested(key)


def published_folder(key: str) -> str:
    """Return a partition's key as a folder name in the URL of a published folder.

    The result is a single name, so no key leads elsewhere. Parquet readers do not ignore it, and
    any two keys have different names.
    """
    presentable = (
        _PRESENTABLE.fullmatch(key)
        and not key.startswith("_")
        and key.rstrip(" .") == key
        and len(key.encode()) <= _MAX_BYTES
        and unicodedata.is_normalized("NFC", key)
    )
    return key if presentable else _digested(key)


def _digested(key: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9\-]+", "-", key)[:40].strip("-") or "key"
    return f"{readable}~{hashlib.sha256(key.encode()).hexdigest()[:20]}"
