"""Hugging Face datasets: `HuggingFaceSource`, and `HuggingFaceStream` for streams."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._keywords import require_columns
from vane_dagster._worker_process import is_worker
from vane_dagster.errors import DefinitionError, SourceError, first_line, names
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.sources.base import Source
from vane_dagster.sources.row_blocks import BLOCK_ROWS
from vane_dagster.sources.rows_source import Positions, Rows, RowsSource
from vane_dagster.sources.stored_table_source import StoredTableSource, write_blocks
from vane_dagster.sources.table_reader import in_plain_types, table_schema
from vane_dagster.storage.stored_tables import ArrowRows, Place, StoredTable, clipped
from vane_dagster.types.schema import check_distinct, check_storable

_LABEL = "vd.huggingface"
_SAVED = ("state.json", "dataset_dict.json")
_NO_ROWS = ("token", "storage_options", "cache_dir", "num_proc", "keep_in_memory")
"""Arguments of `load_dataset` that have no influence on the rows."""


@dataclass(frozen=True)
class _Loading:
    """How a dataset is loaded.

    Attributes:
        given: A dataset, or the path or name of one.
        split: The split.
        name: The configuration.
        revision: The revision on the hub.
        options: Further arguments of `load_dataset`.
    """

    given: Any
    split: str | None
    name: str | None
    revision: str | None
    options: Mapping[str, Any] = field(repr=False)

    @property
    def label(self) -> str:
        """What is loaded, for messages."""
        if not isinstance(self.given, str):
            return f"the {type(self.given).__name__} in memory"
        split = f", split {self.split!r}" if self.split else ""
        name = f", {self.name!r}" if self.name else ""
        return f"dataset {self.given!r}{name}{split}"

    def load(self, streaming: bool = False) -> Any:
        """Return the dataset."""
        datasets: Any = importlib.import_module("datasets")
        found = self.given
        try:
            if isinstance(found, str):
                found = self._loaded(datasets, streaming)
        except Exception as error:  # of the library, of the hub's client, or of file systems
            raise SourceError(
                f"{_LABEL}: {self.label} cannot be loaded: {type(error).__name__}: "
                f"{first_line(error)}. Check the name or path, the access to the hub, and that a "
                "folder holds data files or was written by save_to_disk"
            ) from error
        if isinstance(found, dict):
            found = self._of_splits(found)
        kind = datasets.IterableDataset if streaming else datasets.Dataset
        if not isinstance(found, kind):
            raise SourceError(f"{_LABEL}: {self.label} is a {type(found).__name__}")
        return found

    def _loaded(self, datasets: Any, streaming: bool) -> Any:
        path = os.path.expanduser(self.given)
        if any(os.path.exists(os.path.join(path, name)) for name in _SAVED):
            loaded = datasets.load_from_disk(path, **self.options)
            if isinstance(loaded, dict):
                loaded = self._of_splits(loaded)
            elif self.split not in (None, str(loaded.split)):
                raise ValueError(f"split is {self.split!r}; the folder holds {loaded.split}")
            return loaded.to_iterable_dataset() if streaming else loaded
        given: dict[str, Any] = {"name": self.name, "split": self.split, "revision": self.revision}
        given |= {"streaming": True} if streaming else {}
        return datasets.load_dataset(self.given, **given, **self.options)

    def _of_splits(self, found: Mapping[str, Any]) -> Any:
        if self.split is None and len(found) == 1:
            return next(iter(found.values()))
        if self.split is None or self.split not in found:
            raise SourceError(
                f"{_LABEL}: {self.label}: split is {self.split!r}; expected one of {names(found)}"
            )
        return found[self.split]


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSource(RowsSource):
    """A dataset with a number of rows, identified by its content."""

    kind: ClassVar[str] = "huggingface"

    def describe(self) -> str:
        return f"Hugging Face {self.label}"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceStream(StoredTableSource):
    """A dataset that is read once, as a stream, into the store.

    Attributes:
        loading: How it is loaded.
        data_version: Part of its identity.
        pipeline: The pipeline that reads it, once it is known: part of the identity of an object.
    """

    kind: ClassVar[str] = "huggingface"
    partitioned_by: ClassVar[str] = "partition_column= without streaming=True"
    loading: _Loading = field(repr=False, compare=False)
    data_version: str | None = None
    pipeline: str = ""

    def of_pipeline(self, name: str) -> Source:
        return replace(self, pipeline=name)

    def url_for(self, partition_key: str | None) -> str:
        """Return what the dataset is, for messages."""
        return self.loading.label

    def describe(self) -> str:
        return f"Hugging Face {self.loading.label}, streamed"

    def identity(self, partition: str | None) -> str:
        given = self.loading
        options = sorted((n, repr(v)) for n, v in given.options.items() if n not in _NO_ROWS)
        # Nothing of an object tells its rows from those of another stream.
        is_named = isinstance(given.given, str)
        own = [given.given] if is_named else [_columns(given.given), self.pipeline]
        place = (given.split, given.name, given.revision, self.data_version)
        return digest(_LABEL, *own, *place, repr(options))[:40]

    def make(self, partition: str | None, identity: str, location: str) -> StoredTable:
        """Read the stream into the store."""
        dataset = self.loading.load(streaming=True)
        known = dataset.features
        schemas = [] if known is None else [_checked(known.arrow_schema)]
        pieces = write_blocks(self.store_root, identity, _streamed(dataset, schemas))
        if not schemas:
            raise SourceError(f"{location}: {self.place} has no rows, and no columns are known")
        return StoredTable(schemas[0], pieces)


def huggingface(
    path: Any,
    *,
    split: str | None = None,
    name: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
    partition_column: str | None = None,
    copy: bool = False,
    version: str | None = None,
    allow_empty: bool = False,
    **load_options: Any,
) -> HuggingFaceSource | HuggingFaceStream:
    """Declare a Hugging Face dataset as a pipeline's source.

    Its rows are identified by their content. Workers read them in the Arrow files in which the
    dataset lies on disk. If some lie in none, or `shuffle`, `sort`, `filter` or `select` have
    scattered them, the dataset is copied into the store.

    Args:
        path: A `datasets.Dataset` or `IterableDataset`, a dict of them by split, a folder that
            `save_to_disk` wrote, or the name or folder that `datasets.load_dataset` takes. It is
            loaded when the rows are needed.
        split: The split; needed if there are several.
        name: The configuration of the dataset.
        revision: The revision on the hub.
        streaming: Whether to read the dataset once, as a stream, into the store, without a copy on
            this machine. It is identified by the arguments, and needs `version` or `revision`.
        partition_column: For a partitioned pipeline: the rows of a partition are those whose value
            in this column, as text, equals the key.
        copy: Whether to copy all rows into the store: for workers that cannot read the files.
        version: Part of the identity of a stream: another one reads it again. Change it with
            whatever changes the rows: the data, or the functions and settings of an
            `IterableDataset`, which is identified by its pipeline, its columns and this.
        allow_empty: Whether a partition without rows is accepted; an error by default.
        **load_options: Further arguments of `datasets.load_dataset`, such as `data_files`.

    Raises:
        DefinitionError: If the library is missing, or the arguments do not fit.
    """
    if importlib.util.find_spec("datasets") is None and not is_worker():
        raise DefinitionError(f"{_LABEL}: Install vane-dagster[huggingface]")
    given = os.fspath(path) if isinstance(path, os.PathLike) else path
    kinds = {kind.__name__ for kind in type(given).__mro__}
    is_stream = streaming or bool(kinds & {"IterableDataset", "IterableDatasetDict"})
    if not isinstance(given, str) and not kinds & {"Dataset", "DatasetDict", "IterableDataset",
                                                   "IterableDatasetDict"}:  # fmt: skip
        raise DefinitionError(
            f"{_LABEL}: path is a {type(path).__module__}.{type(path).__qualname__}; expected a "
            "datasets.Dataset, an IterableDataset, or the path or name of a dataset"
        )
    if not isinstance(given, str) and (name or revision or load_options):
        raise DefinitionError(
            f"{_LABEL}: name, revision and options say how a dataset is loaded, and this one is a "
            f"{type(given).__name__} already. Leave them out"
        )
    loading = _Loading(given, split, name, revision, load_options)
    if not is_stream:
        if version is not None:
            raise DefinitionError(
                f"{_LABEL}: version is for streaming=True; other datasets are identified by their "
                "content. Leave it out"
            )
        return HuggingFaceSource(
            load=functools.cache(lambda: _DatasetRows(loading.load(), copy, partition_column)),
            partition_column=partition_column,
            is_partitioned=partition_column is not None,
            label=loading.label,
            allow_empty=allow_empty,
        )
    if partition_column is not None:
        raise DefinitionError(
            f"{_LABEL}: a stream is read as a whole, and has no partition_column. Leave out "
            "partition_column, or streaming=True"
        )
    if version is None and (revision is None or not isinstance(given, str)):
        raise DefinitionError(
            f"{_LABEL}: a stream has no identity: nothing says whether its rows have changed. Give "
            "version=, and another one when they have; or the revision= of a dataset on the hub"
        )
    return HuggingFaceStream(loading=loading, data_version=version, allow_empty=allow_empty)


class _DatasetRows(Rows):
    """The rows of a `datasets.Dataset`, through its mapping of indices."""

    def __init__(self, dataset: Any, copy: bool, partition_column: str | None) -> None:
        schema = _checked(dataset.features.arrow_schema)
        super().__init__(schema, len(dataset), partition_column)
        self._arrow = dataset.with_format("arrow")
        self._embeds = _has_external_files(dataset)
        is_copied = copy or self._embeds or dataset._indices is not None
        files = [] if is_copied else list(_in_files(dataset.data, self.schema))
        self._files = [rows for rows in files if rows] if all(files) else []

    def take(self, positions: Positions) -> pa.Table:
        key = positions if isinstance(positions, range) else positions.tolist()
        return _plain_chunk(self._arrow[key], self.schema, self._embeds)

    def column(self, name: str) -> pa.ChunkedArray:
        require_columns("partition_column: the dataset", [name], self.schema.names, SourceError)
        found = self._arrow.select_columns([name])[:]
        return in_plain_types(found, pa.schema([self.schema.field(name)])).column(name)

    def places(self, positions: Positions) -> Sequence[Place] | None:
        """Return ranges of rows of Arrow files; None for scattered rows, or if some are in none."""
        if not self._files or not isinstance(positions, range):
            return None
        return list(clipped(self._files, positions.start, positions.stop))


def _checked(schema: pa.Schema) -> pa.Schema:
    plain = table_schema(schema)
    check_distinct(plain.names, _LABEL)
    check_storable(plain, _LABEL)
    return plain


def _plain_chunk(table: pa.Table, schema: pa.Schema, embeds: bool) -> pa.Table:
    if embeds:
        tables: Any = importlib.import_module("datasets.table")
        table = tables.embed_table_storage(table)
    return in_plain_types(table, schema)


def _streamed(dataset: Any, schemas: list[pa.Schema]) -> Iterator[pa.Table]:
    """Yield the rows of a stream; `schemas` gets the schema if it is empty."""
    features = dataset.features
    embeds = features is not None and bool(_media(features))
    for chunk in dataset.with_format("arrow").iter(batch_size=BLOCK_ROWS):
        if features is not None:
            chunk = chunk.select(features.arrow_schema.names).cast(features.arrow_schema)
        if not schemas:
            schemas.append(_checked(chunk.schema))
        yield _plain_chunk(chunk, schemas[0], embeds)


def _media(features: Mapping[str, Any]) -> list[str]:
    """Return the columns with images, sounds and the like, which may name files."""
    inner: Any = importlib.import_module("datasets.features.features")
    return [name for name, each in features.items() if inner.require_storage_embed(each)]


def _has_external_files(dataset: Any) -> bool:
    """Return whether rows name files in place of their content.

    The content is part of the rows: the files may change, and workers may not have them.
    """
    for name in _media(dataset.features):
        for chunk in dataset.data.column(name).chunks:
            chunk = getattr(chunk, "storage", chunk)
            if not pa.types.is_struct(chunk.type):
                return True
            content, path = pc.struct_field(chunk, "bytes"), pc.struct_field(chunk, "path")
            if pc.any(pc.and_(pc.is_null(content), pc.is_valid(path))).as_py():
                return True
    return False


def _in_files(data: Any, schema: pa.Schema) -> Iterator[ArrowRows | None]:
    """Yield where the rows of a dataset's table lie, in order; None for rows in no Arrow file."""
    rows: Iterable[Sequence[Any]] = getattr(data, "blocks", [[data]])
    for row in rows:
        yield _in_file(row[0], schema) if len(row) == 1 else None


def _in_file(block: Any, schema: pa.Schema) -> ArrowRows | None:
    """Return where the rows of a block lie in its Arrow file."""
    path, replays = getattr(block, "path", None), getattr(block, "replays", None)
    if path is None or replays is None:
        return None
    own = pa.ipc.open_stream(pa.memory_map(path)).schema
    start = 0
    for action, args, kwargs in replays:
        if action == "slice" and not kwargs:
            start += int(args[0])
        elif action not in ("select", "drop", "remove_column", "cast", "replace_schema_metadata"):
            return None
    plain = table_schema(own)
    for column in schema:  # a cast may have changed the values
        if column.name not in own.names or plain.field(column.name).type != column.type:
            return None
    stat = os.stat(path)
    return ArrowRows(path, stat.st_size, stat.st_mtime_ns, start, start + block.num_rows)


def _columns(dataset: Any) -> str:
    """Return the columns of a stream, or of each of several splits, as far as they are known."""
    found = dataset if isinstance(dataset, Mapping) else {"": dataset}
    return repr({split: repr(each.features) for split, each in found.items()})
