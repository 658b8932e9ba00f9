"""Sources: where a pipeline's rows come from.

They are Parquet files anywhere, or what the store holds of another asset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Union

from vane_dagster._arguments import PLACEHOLDER, check_url, fill_placeholders
from vane_dagster._secrets import url_parts, with_options
from vane_dagster.errors import DefinitionError, names


@dataclass(frozen=True)
class ParquetSource:
    """Parquet files, found by a URL pattern for each partition.

    Attributes:
        url: A local path or fsspec URL: a file, a folder or a glob, with ``{partition_key}``, or
            ``{partition_key.<dimension>}`` of a multi-partition, where the key stands.
        asset: Key of the Dagster asset that writes the files, as "a/b", if there is one.
        allow_empty: Whether a partition whose files hold no rows is in order.
        storage_options: Passed to fsspec; never part of a key.
    """

    url: str
    asset: str | None = None
    allow_empty: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def fields(self) -> tuple[str, ...]:
        """The placeholders of the URL."""
        return tuple(PLACEHOLDER.findall(self.url))

    @property
    def of_all_partitions(self) -> ParquetSource:
        """The files of all partitions as one source, whose URL is a glob."""
        return replace(self, url=PLACEHOLDER.sub("*", self.url))

    def url_for(self, partition_key: str | None, escape: Any = str) -> str:
        """The URL pattern of one partition, the key's own text passed through `escape`."""
        return fill_placeholders(self.url, partition_key, escape)


@dataclass(frozen=True)
class StoredSource:
    """Rows in the pipeline's own store: another pipeline's stage, or an ordinary asset's.

    Attributes:
        asset: Key of the Dagster asset, as "a/b".
        allow_empty: Whether a partition without rows is in order.
    """

    asset: str
    allow_empty: bool = False

    def url_for(self, partition_key: str | None) -> str:
        """What stands for the place in messages."""
        return f"asset {self.asset}"


Source = Union[ParquetSource, StoredSource]


def parquet(
    url: str,
    *,
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ParquetSource:
    """Declares Parquet files as a pipeline's source.

    Args:
        url: A path or fsspec URL: a file, a folder (every ``*.parquet`` below it) or a glob. A user
            and password in it are taken as storage options, and stand in no key or manifest.
            ``{partition_key}`` stands for the partition's key, ``{partition_key.<dimension>}`` for
            one dimension of a multi-partition.
        asset: The Dagster asset that writes the files: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether files without any rows are in order; an error by default.
        storage_options: Options of the fsspec file system, such as an S3 endpoint.

    Raises:
        DefinitionError: If the URL is empty or has an unknown placeholder.
    """
    check_url("vd.parquet", url)
    writer = _asset_path(asset, "vd.parquet")
    url, found = url_parts(url)
    return ParquetSource(url, writer, allow_empty, with_options(found, storage_options))


def stored(asset: Any, *, allow_empty: bool = False) -> StoredSource:
    """Declares what the store holds of another asset as a pipeline's source.

    A partition of the pipeline reads the partition of that key; an unpartitioned pipeline reads all
    partitions that were materialized.

    Args:
        asset: A stage of another pipeline, an ordinary asset whose rows are kept by the
            `FragmentStore` as its IO manager, or the key of either, as "a/b".
        allow_empty: Whether a partition without any rows is in order; an error by default.

    Raises:
        DefinitionError: If it is not one asset.
    """
    path = _asset_path(asset, "vd.stored")
    if not path:
        raise DefinitionError("vd.stored: asset is empty; expected the key of an asset, as 'a/b'")
    return StoredSource(path, allow_empty)


def as_source(culprit: str, source: Any) -> Source:
    """A pipeline's source as it was declared, or by an asset alone.

    Raises:
        DefinitionError: If it is neither.
    """
    if isinstance(source, (ParquetSource, StoredSource)):
        return source
    if isinstance(source, str) or not (hasattr(source, "path") or hasattr(type(source), "key")):
        raise DefinitionError(
            f"{culprit}: source is a {type(source).__name__}; expected vd.parquet(url), a stage of "
            "another pipeline, an asset, or vd.stored(asset key)"
        )
    return stored(source)


def _asset_path(asset: Any, culprit: str) -> str | None:
    if asset is None or isinstance(asset, str):
        return asset
    several = getattr(asset, "keys", ())
    if not callable(several) and len(several) > 1:
        listed = names(sorted("/".join(key.path) for key in several))
        raise DefinitionError(
            f"{culprit}: asset is {len(several)} assets, {listed}; give the key of one of them"
        )
    key = getattr(asset, "key", asset)
    path = getattr(key, "path", None)
    if path is None:
        raise DefinitionError(
            f"{culprit}: asset is a {type(asset).__name__}; expected an asset key, a string 'a/b' "
            "or the asset that writes the files"
        )
    return "/".join(path)
