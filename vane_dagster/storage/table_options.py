"""URLs and storage options of table formats whose drivers are not fsspec's."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from vane_dagster._secrets import keep_options, revealed
from vane_dagster.errors import DefinitionError
from vane_dagster.storage.filesystem import StoragePath, protocol_of

_MISREAD = re.compile(r"[%\\?#]")


def check_table_url(
    where: str, url: str, format: str, schemes: Sequence[str] = ("s3", "s3a")
) -> None:
    """Check that the driver of a format can open a URL: a local one, or of one of the schemes."""
    if protocol_of(url) not in ("file", *schemes):
        *most, last = ("a local path", *(f"{scheme}://" for scheme in schemes))
        raise DefinitionError(
            f"{where}: {format} tables at {url!r} are not supported; expected {', '.join(most)} or "
            f"{last}"
        )
    if misread := _MISREAD.search(url):
        raise DefinitionError(
            f"{where}: {url!r} holds {misread.group()!r}, which {format}'s driver takes for a part "
            "of a URL; give the table another name"
        )


def driver_url(target: StoragePath) -> str:
    """Return a table's URL as the drivers of Delta and Lance take it."""
    if target.is_local:
        return target.path
    return target.url.rstrip("/").replace("s3a://", "s3://", 1)


def driver_options(target: StoragePath) -> dict[str, str] | None:
    """Return the storage options of these drivers."""
    return None if target.is_local else table_options(target)


def table_options(target: StoragePath) -> dict[str, str]:
    """Convert options of fsspec's S3 driver to those of the drivers of Delta and Lance."""
    keep_options(target.storage_options)
    given = revealed(target.storage_options)
    client = dict(given.get("client_kwargs") or {})
    endpoint = client.get("endpoint_url") or given.get("endpoint_url")
    options = {
        "AWS_ACCESS_KEY_ID": given.get("key"),
        "AWS_SECRET_ACCESS_KEY": given.get("secret"),
        "AWS_SESSION_TOKEN": given.get("token"),
        "AWS_SKIP_SIGNATURE": "true" if given.get("anon") else None,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true" if str(endpoint or "").startswith("http:") else None,
        "AWS_REGION": client.get("region_name"),
        "AWS_CONDITIONAL_PUT": "etag",
    }
    if endpoint and not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        options["AWS_REGION"] = options["AWS_REGION"] or "us-east-1"
    return {name: str(value) for name, value in options.items() if value}
