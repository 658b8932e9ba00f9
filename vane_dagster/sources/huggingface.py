"""Hugging Face datasets: `HuggingFaceSource`, and `HuggingFaceStream` for streams."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._arguments import check_installed
from vane_dagster._worker_process import is_worker
from vane_dagster.errors import DefinitionError, SourceError, first_line, names
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.sources.row_blocks import BLOCK_ROWS
from vane_dagster.sources.rows_source import Positions, Rows, RowsSource
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.sources.stored_table_source import StoredTableSource, write_blocks
from vane_dagster.storage.stored_tables import ArrowRows, StoredTable
from vane_dagster.types.schema import check_distinct, check_storable

_LABEL = "vd.huggingface"
_SAVED = ("state.json", "dataset_dict.json")
_NO_ROWS = ("token", "storage_options", "cache_dir", "num_proc", "keep_in_memory")
"""Arguments of `load_dataset` that have no influence on the rows."""
_IN_PLACE = ("slice", "select", "drop", "remove_column", "cast", "replace_schema_metadata")
"""What may have been done to a part of a dataset whose rows still lie in its file."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSource(RowsSource):
    """A dataset with a number of rows, identified by its content."""

    kind: ClassVar[str] = "huggingface"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceStream(StoredTableSource):
    """A dataset that is read once, as a stream, into the store.

    Attributes:
        load: Returns the stream.
        label: What it is, for messages.
        key: What identifies its rows.
    """

    kind: ClassVar[str] = "huggingface"
    partitioned_by: ClassVar[str] = "partition_column= without streaming=True"
    load: Callable[[], Any] = field(repr=False, compare=False)
    label: str
    key: str

    def url_for(self, partition_key: str | None) -> str:
        """Return what the dataset is, for messages."""
        return self.label

    def identity(self, partition: str | None) -> str:
        return self.key

    def make(self, partition: str | None, identity: str, location: str) -> StoredTable:
        """Read the stream into the store."""
        schemas: list[pa.Schema] = []
        pieces = write_blocks(self.store_root, identity, _streamed(self.load(), schemas))
        if not schemas:
            raise SourceError(f"{location}: {self.place} has no rows, and no columns are known")
        return StoredTable(schemas[0], pieces)


def huggingface(
    path: Any,
    *,
    split: str | None = None,
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
        path: A `datasets.Dataset`, a dict of them by split, a folder that `save_to_disk` wrote, or
            the name or folder that `datasets.load_dataset` takes. It is loaded when the rows are
            needed.
        split: The split; needed if there are several.
        streaming: Whether to read the dataset once, as a stream, into the store, without a copy on
            this machine. It is identified by the arguments, and needs `version` or `revision`.
        partition_column: For a partitioned pipeline: the rows of a partition are those whose value
            in this column, as text, equals the key.
        copy: Whether to copy all rows into the store: for workers that cannot read the files.
        version: Part of the identity of a stream: another one reads it again. Change it with the
            data. Other datasets are identified by their content alone.
        allow_empty: Whether a partition without rows is accepted; an error by default.
        **load_options: Further arguments of `datasets.load_dataset`, such as `name`, the
            configuration, `revision`, that on the hub, and `data_files`.

    Raises:
        DefinitionError: If the library is missing, or the arguments do not fit.
    """
    if not is_worker():
        check_installed(_LABEL, "datasets", "huggingface")
    given = os.fspath(path) if isinstance(path, os.PathLike) else path
    if is_loaded := not isinstance(given, str):
        kind = f"{type(given).__module__}.{type(given).__qualname__}"
        if type(given).__name__ not in ("Dataset", "DatasetDict"):
            raise DefinitionError(
                f"{_LABEL}: path is a {kind}; expected a datasets.Dataset, a dict of them, or the "
                "path or name of a dataset. Make one of an IterableDataset, by "
                "datasets.Dataset.from_generator(lambda: iter(stream))"
            )
        if streaming or load_options:
            raise DefinitionError(
                f"{_LABEL}: path is a {kind}, which is loaded already. Leave streaming and the "
                "options of load_dataset out"
            )
    own = f"the {kind} in memory" if is_loaded else f"the Hugging Face dataset {given!r}"
    label = f"{own}, split {split!r}" if split else own
    load = functools.partial(_loaded, given, label, split, streaming, load_options)
    if not streaming:
        return HuggingFaceSource(
            load=functools.cache(lambda: _rows(load(), copy, partition_column)),
            partition_column=partition_column,
            is_partitioned=partition_column is not None,
            label=label,
            allow_empty=allow_empty,
        )
    if partition_column is not None or not (version or load_options.get("revision")):
        raise DefinitionError(
            f"{_LABEL}: a stream is read as a whole, without a partition_column, and nothing says "
            "whether its rows have changed. Give version=, and another one when they have; or the "
            "revision= of a dataset on the hub"
        )
    options = sorted((n, repr(v)) for n, v in load_options.items() if n not in _NO_ROWS)
    key = digest(_LABEL, given, split, version, repr(options))[:40]
    return HuggingFaceStream(load=load, label=label, key=key, allow_empty=allow_empty)


def _loaded(
    given: Any, label: str, split: str | None, streaming: bool, options: Mapping[str, Any]
) -> Any:
    """Return a dataset, or a stream of one."""
    datasets: Any = importlib.import_module("datasets")
    found = given
    try:
        if isinstance(given, str):
            path = os.path.expanduser(given)
            if any(os.path.exists(os.path.join(path, name)) for name in _SAVED):
                found = datasets.load_from_disk(path, **options)
                if not isinstance(found, dict) and split not in (None, str(found.split)):
                    raise ValueError(f"split is {split!r}; the folder holds {found.split}")
            else:
                more = {"split": split, "streaming": streaming, **options}
                found = datasets.load_dataset(given, **more)
    except Exception as error:  # of the library, of the hub's client, or of file systems
        raise SourceError(
            f"{_LABEL}: {label} cannot be loaded: {type(error).__name__}: {first_line(error)}. "
            "Check the name or path, the access to the hub, and that a folder holds data files or "
            "was written by save_to_disk"
        ) from error
    if isinstance(found, dict) and len(found) == 1 and split is None:
        (found,) = found.values()
    elif isinstance(found, dict):
        if split not in found:
            raise SourceError(
                f"{_LABEL}: {label}: split is {split!r}; expected one of {names(found)}"
            )
        found = found[split]
    return found


def _rows(dataset: Any, copy: bool, partition_column: str | None) -> Rows:
    """Return the rows of a `datasets.Dataset`, through its mapping of indices."""
    schema = _checked(dataset.features.arrow_schema)
    arrow, embeds = dataset.with_format("arrow"), _has_external_files(dataset, schema)

    def take(positions: Positions) -> pa.Table:
        key = positions if isinstance(positions, range) else positions.tolist()
        return _plain_chunk(arrow[key], schema, embeds)

    def column(name: str) -> pa.ChunkedArray:
        return arrow.select_columns([name])[:].cast(pa.schema([schema.field(name)])).column(name)

    files: list[ArrowRows | None] = []
    if not (copy or embeds or dataset._indices is not None):
        blocks = getattr(dataset.data, "blocks", [[dataset.data]])
        files = [_in_file(row[0], schema) if len(row) == 1 else None for row in blocks]
    places = [rows for rows in files if rows] if all(files) else []
    return Rows(schema, len(dataset), take, column, partition_column, places)


def _checked(schema: pa.Schema) -> pa.Schema:
    plain = plain_schema(schema)
    check_distinct(plain.names, _LABEL)
    check_storable(plain, _LABEL)
    return plain


def _plain_chunk(table: pa.Table, schema: pa.Schema, embeds: bool) -> pa.Table:
    if embeds:
        tables: Any = importlib.import_module("datasets.table")
        table = tables.embed_table_storage(table)
    return table.cast(schema)


def _streamed(dataset: Any, schemas: list[pa.Schema]) -> Iterator[pa.Table]:
    """Yield the rows of a stream; `schemas` gets the schema if it is empty."""
    features = dataset.features
    embeds = features is not None and bool(_media(features))
    if features is not None:
        schemas.append(_checked(features.arrow_schema))
    for chunk in dataset.with_format("arrow").iter(batch_size=BLOCK_ROWS):
        if features is not None:
            chunk = chunk.select(features.arrow_schema.names).cast(features.arrow_schema)
        elif not schemas:
            schemas.append(_checked(chunk.schema))
        yield _plain_chunk(chunk, schemas[0], embeds)


def _media(features: Mapping[str, Any]) -> list[str]:
    """Return the columns with images, sounds and the like, which may name files."""
    inner: Any = importlib.import_module("datasets.features.features")
    return [name for name, each in features.items() if inner.require_storage_embed(each)]


def _has_external_files(dataset: Any, schema: pa.Schema) -> bool:
    """Return whether rows name files in place of their content.

    The content is part of the rows: the files may change, and workers may not have them.
    """
    for name in _media(dataset.features):
        kind = schema.field(name).type
        if not pa.types.is_struct(kind):
            return True
        column = dataset.data.column(name).cast(kind)
        content, path = pc.struct_field(column, "bytes"), pc.struct_field(column, "path")
        if pc.any(pc.and_(pc.is_null(content), pc.is_valid(path))).as_py():
            return True
    return False


def _in_file(block: Any, schema: pa.Schema) -> ArrowRows | None:
    """Return where the rows of a block lie in its Arrow file; None if they lie in none."""
    path, replays = getattr(block, "path", None), getattr(block, "replays", ())
    if path is None or any(action not in _IN_PLACE for action, *_ in replays):
        return None
    start = sum(int(args[0]) for action, args, _ in replays if action == "slice")
    own = plain_schema(pa.ipc.open_stream(pa.memory_map(path)).schema)
    if not all(column in own for column in schema):  # a cast may have changed the values
        return None
    stat = os.stat(path)
    return ArrowRows(path, stat.st_size, stat.st_mtime_ns, start, start + block.num_rows)
