"""`FileSource`: a source of files that match a URL pattern, partition by partition."""

from __future__ import annotations

import functools
import glob
import os
import re
import sys
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Union

import pyarrow as pa

from vane_dagster._arguments import (
    any_partition,
    check_placeholders,
    check_url,
    checked_url,
    fill_placeholders,
)
from vane_dagster._lazy import fsspec
from vane_dagster.errors import DefinitionError, SourceError, VaneError, described
from vane_dagster.retries import with_retries
from vane_dagster.sources.base import Listed, Source, default_rule
from vane_dagster.sources.files import file_record
from vane_dagster.storage.filesystem import (
    StoragePath,
    absolute_url,
    files_below,
    in_threads,
    is_folder_marker,
    protocols,
)
from vane_dagster.storage.manifest import FileRecord

if TYPE_CHECKING:
    import dagster as dg

_LISTED_ONE_BY_ONE = 64
_MAGIC = re.compile(r"[*?\[]")
_HIDDEN = re.compile(r"(?:^|/)[._]")
Suffix = Union[str, tuple[str, ...]]
"""A suffix of file names, or several."""


@dataclass(frozen=True)
class FileSource(Source):
    """Files of one format that match a URL pattern for each partition.

    A subclass sets `kind` and `suffix`, and defines `split` and `read`.

    Attributes:
        suffix: The suffix of the names of files in a folder, such as ".parquet", or several.
        label: The format's name in messages; None for `kind`.
        url: A local path or fsspec URL: a file, a folder or a glob. ``{partition_key}`` is replaced
            by the key, ``{partition_key.<dimension>}`` by one dimension of a multi-partition,
            ``{partition_start:%Y/%m}`` and ``{partition_end}`` by the bounds of a time window.
        asset: Key of the Dagster asset that writes the files, such as "a/b"; None for none.
        allow_empty: Whether a partition without files or rows is accepted.
        storage_options: Passed to fsspec; never part of a key.
    """

    suffix: ClassVar[Suffix]
    label: ClassVar[str | None] = None
    url: str
    asset: str | None = None
    allow_empty: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def url_for(self, partition_key: str | None) -> str:
        """Return the URL pattern of one partition."""
        return fill_placeholders(self.url, partition_key)

    def validate(self, location: str, partitions_def: dg.PartitionsDefinition[Any] | None) -> None:
        check_url(location, self.url)
        check_placeholders(location, self.url, partitions_def)

    @property
    def place(self) -> str:
        return self.url

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,)

    def schema(self, location: str) -> pa.Schema:
        """Return the columns of the last file of all partitions."""
        return self.split(self._all_files(location)[-1:], default_rule([]), location).schema

    def _all_files(self, location: str) -> Sequence[FileRecord]:
        """List the files of all partitions."""
        source = replace(self, url=any_partition(self.url), allow_empty=False)
        return source.required(source.list_files([None], location)[None], None, location)

    def options_for(self, url: str) -> Mapping[str, Any]:
        return self.storage_options

    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        """List the files of some partitions.

        Up to 64 partitions are listed separately, in parallel. More are listed by one recursive
        listing of their common folder. If that fails on a local disk, they are listed separately
        too, so that a circular link or an unreadable folder fails its own partition only.
        """
        place = StoragePath(self.url, self.storage_options)  # has a file system for each thread
        failed: dict[str | None, Listed] = {}
        patterns: dict[str | None, _Pattern] = {}
        for key in partitions:
            try:
                path = fill_placeholders(place.path, key, lambda k: glob.escape(key_in_path(k)))
                patterns[key] = _Pattern(path, self.suffix)
            except VaneError as error:
                failed[key] = SourceError(f"{location}: {error}")
        listing: _Listing | None = None
        if len(patterns) > _LISTED_ONE_BY_ONE:
            try:
                listing = with_retries(lambda: _Listing(place.fs, patterns.values()))
            except Exception as error:  # drivers raise their own exception classes
                if not place.is_local:  # where each partition would wait for the storage again
                    return failed | dict.fromkeys(patterns, _unlisted(self.url, error, location))

        def recorded(pattern: _Pattern) -> tuple[FileRecord, ...]:
            infos = listing.matching(pattern) if listing else _matching(place.fs, pattern)
            records = [file_record(place.fs, info) for info in infos]
            return tuple(sorted(records, key=lambda record: record.url))

        def listed(key: str | None) -> Listed:
            try:
                return with_retries(lambda: recorded(patterns[key]))
            except SourceError as error:
                return SourceError(f"{location}: {error}")
            except Exception as error:  # drivers raise their own exception classes
                return _unlisted(self.url_for(key), error, location)

        each = map(listed, patterns) if listing else in_threads(listed, patterns)
        return failed | dict(zip(patterns, each))

    def missing(self, partition: str | None, location: str) -> SourceError | None:
        where = "" if partition is None else f" for partition {partition!r}"
        place, kind = absolute_url(self.url_for(partition)), self.label or self.kind
        hint = "; *, ? and [ make a URL a pattern: in a name, write them as [*], [?] and [[]"
        return SourceError(
            f"{location}: no {kind} file{where} at {place!r}; "
            "expected a file, a folder that holds some, or a glob that matches some. "
            f"Check the path{hint if glob.has_magic(self.url) else ''}. Write the partition first, "
            "accept that it has no files by allow_empty=True, or, if its files have another "
            "format, use the source for that format"
        )


def file_arguments(
    location: str,
    url: str | os.PathLike[str],
    asset: Any,
    storage_options: Mapping[str, Any] | None,
    allow_empty: bool,
) -> tuple[str, str | None, bool, Mapping[str, Any]]:
    """Validate the arguments that all sources of files share, in the order of `FileSource`."""
    writer = asset_path(asset, location)
    return checked_url(location, url), writer, allow_empty, storage_options or {}


def asset_path(asset: Any, location: str) -> str | None:
    """Return the key of an asset, such as "a/b"."""
    if asset is None or isinstance(asset, str):
        return asset
    path = getattr(getattr(asset, "key", asset), "path", asset)
    texts = path if isinstance(path, (list, tuple)) else ()
    if not texts or not all(isinstance(text, str) for text in texts):
        raise DefinitionError(
            f"{location}: asset is a {type(asset).__name__}; expected an asset key, as 'a/b' or "
            '["a", "b"], or the asset that writes the files'
        )
    return "/".join(path)


def _unlisted(url: str, error: Exception, location: str) -> SourceError:
    text = (
        f"{location}: source {absolute_url(url)!r} cannot be listed: {described(error)}. Check the "
        "URL and the credentials, and remove broken and circular links"
    )
    made = SourceError(text)
    made.__cause__ = error
    return made


def key_in_path(key: str) -> str:
    """Return a partition's key, to insert it into a path."""
    if {"", ".", ".."} & set(re.split(r"[/\\]", key)):
        raise SourceError(
            f"partition {key!r} would lead out of the source's folder; expected a key without '.', "
            "'..' or an empty text between separators"
        )
    return key


def _matching(fs: fsspec.AbstractFileSystem, pattern: _Pattern) -> list[dict[str, Any]]:
    """Return the files of a partition, from listings of its own."""
    fs.invalidate_cache()
    path, suffix = pattern.path, pattern.suffix
    if not glob.has_magic(path):
        return list(_data_below(fs, path, suffix))
    if "**" in path and "file" in protocols(fs):  # fsspec's glob would follow a cycle of links
        return _Listing(fs, [pattern]).matching(pattern)
    fixed = len(pattern.literal.rpartition("/")[0])
    files = {}
    for name, info in fs.glob(path, detail=True).items():
        if _is_hidden(name[fixed:]) or is_folder_marker(info):
            continue
        infos = [info] if info["type"] == "file" else _data_below(fs, name, suffix)
        files.update({info["name"]: info for info in infos})
    return list(files.values())


def _data_below(
    fs: fsspec.AbstractFileSystem, path: str, suffix: Suffix
) -> Iterator[dict[str, Any]]:
    """Yield the file at a path, or the files of the format in the folder at that path."""
    base = len(path.rstrip("/")) + 1
    for name, info in files_below(fs, path).items():
        if name == path or _is_data(name[base:], suffix):
            yield info


def _is_data(relative: str, suffix: Suffix) -> bool:
    return relative.endswith(suffix) and not _is_hidden(relative)


def _is_hidden(relative: str) -> bool:
    """Return whether a path contains a name such as `.x` or `_x`, which readers ignore."""
    return _HIDDEN.search(relative) is not None


class _Pattern:
    """The files of a partition: those that a literal path or a glob matches.

    Attributes:
        path: The path or glob.
        suffix: The suffix of the names of files in a folder.
        literal: The path up to its first wildcard.
        glob: The expression of the paths that a glob matches.
    """

    def __init__(self, path: str, suffix: Suffix) -> None:
        self.path, self.suffix = path, suffix
        self.literal = _MAGIC.split(path, maxsplit=1)[0]
        self.glob = re.compile(fsspec.utils.glob_translate(path)) if self.literal != path else None
        self._fixed = len(self.literal.rpartition("/")[0]) + 1 if self.glob else len(path) + 1

    def matches(self, path: str) -> bool:
        """Return whether a file belongs to the partition."""
        relative = path[self._fixed :]
        if self.glob is None:
            return path == self.literal or (
                path[: self._fixed] == f"{self.literal}/" and _is_data(relative, self.suffix)
            )
        if _is_hidden(relative):
            return False
        return bool(self.glob.fullmatch(path)) or (
            path.endswith(self.suffix)
            and any(self.glob.fullmatch(str(folder)) for folder in PurePosixPath(path).parents)
        )


class _Listing:
    """The files of all partitions, from one recursive listing of their common folder."""

    def __init__(self, fs: fsspec.AbstractFileSystem, patterns: Collection[_Pattern]) -> None:
        literals = [pattern.literal for pattern in patterns]
        common = os.path.commonprefix(literals)  # noqa: RUF071  # names may be cut
        folder, _, beginning = common.rpartition("/")
        fs.invalidate_cache()
        self._files = files_below(fs, folder or "/", beginning)
        self._paths = sorted(self._files)

    @functools.cached_property
    def _by_name(self) -> Mapping[str, Sequence[int]]:
        """The positions of the paths with a name, of a folder or of the file."""
        numbers: dict[str, list[int]] = {}
        for number, path in enumerate(self._paths):
            for name in set(path.split("/")):
                numbers.setdefault(name, []).append(number)
        return numbers

    def matching(self, pattern: _Pattern) -> list[dict[str, Any]]:
        """Return the files of a partition.

        For a glob, only the files whose paths have the rarest name of its path are compared.
        """
        end = pattern.literal + chr(sys.maxunicode)
        places: Sequence[int]
        places = range(bisect_left(self._paths, pattern.literal), bisect_left(self._paths, end))
        if pattern.glob:
            plain = (name for name in pattern.path.split("/") if not glob.has_magic(name))
            places = min(places, *(self._by_name.get(name, []) for name in plain), key=len)
        paths = (self._paths[place] for place in places)
        return [self._files[path] for path in paths if pattern.matches(path)]
