"""Digests of values that the user passes to a stage."""

from __future__ import annotations

from typing import Any

from vane_dagster.fingerprint.dependencies import Reach
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import combine
from vane_dagster.fingerprint.modules import Finder
from vane_dagster.fingerprint.objects import ObjectEncoder


def value_digest(value: Any, path: str = "value", files: LocalFiles | None = None) -> str:
    """Hashes a value so that it is the same in every process.

    Args:
        value: A plain value, a container of them, an array or table, a dataclass or pydantic model,
            a function or class. A text or path that names a local file or folder counts with the
            content.
        path: How the user wrote it, for messages: ``fn_constructor_kwargs``.
        files: Reads what paths name. Default: all but folders of the machine as a whole.

    Raises:
        CodeIdentityError: The value, or something in it, has no stable identity.
    """
    reach = Reach(Finder(), None)
    token = ObjectEncoder(reach, files).digest(value, path)
    return combine("value", token, reach.digest())
