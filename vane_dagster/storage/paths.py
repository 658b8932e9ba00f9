"""Folders of partitions: whatever a key holds, never outside their parent, never two in one."""

from __future__ import annotations

import hashlib
import re
import unicodedata

UNPARTITIONED = "~unpartitioned"
_PLAIN = re.compile(r"[a-z0-9_=][a-z0-9_=.\-]{0,99}")
_PRESENTABLE = re.compile(r"[\w=@+\-][\w=@+\-.,:;| ]*")
_MAX_BYTES = 200


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
        and len(key.encode()) <= _MAX_BYTES
        and unicodedata.is_normalized("NFC", key)
    )
    return key if presentable else _digested(key)


def _digested(key: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9\-]+", "-", key)[:40].strip("-") or "key"
    return f"{readable}~{hashlib.sha256(key.encode()).hexdigest()[:20]}"
