"""`HuggingFaceSource`: the rows of a Hugging Face dataset."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from vane_dagster._arguments import check_installed
from vane_dagster._worker_process import is_worker
from vane_dagster.errors import DefinitionError, SourceError, first_line, names
from vane_dagster.sources.rows_source import Positions, Rows, RowsSource
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.types.casts import cast_table
from vane_dagster.types.schema import check_column_names, check_storable

_LABEL = "vd.huggingface"
_SAVED = ("state.json", "dataset_dict.json")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSource(RowsSource):
    """A dataset with a number of rows, identified by its content."""

    kind: ClassVar[str] = "huggingface"


def huggingface(
    path: Any,
    *,
    split: str | None = None,
    partition_column: str | None = None,
    allow_empty: bool = False,
    **load_options: Any,
) -> HuggingFaceSource:
    """Declare a Hugging Face dataset as a pipeline's source.

    Its rows are identified by their content. The first run copies them into the store, where
    workers read them.

    It requires ``vane-dagster[huggingface]``. Only the machine that plans the run needs the
    dataset. The rows are hashed once in each process that lists the source, at 0.1 GB/s for short
    rows and 0.7 GB/s for images. Images and sounds are not decoded: they are structs of ``bytes``
    and ``path``, and if a row only names a file, the file is read into the row. Class labels are
    numbers. Streams are not supported: convert an `IterableDataset` with
    ``Dataset.from_generator``.

    Args:
        path: A `datasets.Dataset`, a dict of them by split, a folder that `save_to_disk` wrote, or
            the name or folder that `datasets.load_dataset` takes. It is loaded when the rows are
            needed.
        split: The split; needed if there are several.
        partition_column: For a partitioned pipeline: the rows of a partition are those whose value
            in this column, as text, equals the key. If all times are at midnight, they count as
            days. Rows that belong to no partition cause a warning.
        allow_empty: Whether a partition without rows is accepted; an error by default.
        **load_options: Other arguments of `datasets.load_dataset`, such as `name` (the
            configuration), `revision` (on the hub) and `data_files`.

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
        if load_options:
            raise DefinitionError(
                f"{_LABEL}: path is a {kind}, which is already loaded. Leave the options of "
                "load_dataset out"
            )
    if load_options.get("streaming"):
        raise DefinitionError(
            f"{_LABEL}: streaming is given, but streams have no identity. Leave it out, or make a "
            "dataset of the stream, by datasets.Dataset.from_generator(lambda: iter(stream))"
        )
    own = f"the {kind} in memory" if is_loaded else f"the Hugging Face dataset {given!r}"
    label = f"{own}, split {split!r}" if split else own
    load = functools.partial(_loaded, given, label, split, load_options)
    return HuggingFaceSource(
        load=functools.cache(lambda: _rows(load(), partition_column)),
        partition_column=partition_column,
        is_partitioned=partition_column is not None,
        label=label,
        allow_empty=allow_empty,
    )


def _loaded(given: Any, label: str, split: str | None, options: Mapping[str, Any]) -> Any:
    datasets: Any = importlib.import_module("datasets")
    data = given
    try:
        if isinstance(given, str):
            path = os.path.expanduser(given)
            if any(os.path.exists(os.path.join(path, name)) for name in _SAVED):
                data = datasets.load_from_disk(path, **options)
                if not isinstance(data, dict) and split not in (None, str(data.split)):
                    raise ValueError(f"split is {split!r}; the folder holds {data.split}")
            else:
                data = datasets.load_dataset(given, split=split, **options)
    except Exception as error:  # of the library, of the hub's client, or of file systems
        raise SourceError(
            f"{_LABEL}: {label} cannot be loaded: {type(error).__name__}: {first_line(error)}. "
            "Check the name or path, the access to the hub, and that a folder holds data files or "
            "was written by save_to_disk"
        ) from error
    if isinstance(data, dict) and len(data) == 1 and split is None:
        (data,) = data.values()
    elif isinstance(data, dict):
        if split not in data:
            raise SourceError(
                f"{_LABEL}: {label}: split is {split!r}; expected one of {names(data)}"
            )
        data = data[split]
    return data


def _rows(dataset: Any, partition_column: str | None) -> Rows:
    """Return the rows of a `datasets.Dataset`, through its mapping of indices."""
    schema = plain_schema(dataset.features.arrow_schema)
    check_column_names(schema.names, _LABEL)
    check_storable(schema, _LABEL)
    arrow, embeds = dataset.with_format("arrow"), _holds_media(dataset.features)

    def take(positions: Positions) -> pa.Table:
        key = positions if isinstance(positions, range) else positions.tolist()
        table = arrow[key]
        if embeds:
            inner: Any = importlib.import_module("datasets.table")
            table = inner.embed_table_storage(table)
        return cast_table(table, schema)

    def column(name: str) -> pa.ChunkedArray:
        wanted = pa.schema([schema.field(name)])
        return cast_table(arrow.select_columns([name])[:], wanted).column(name)

    return Rows(schema, len(dataset), take, column, partition_column)


def _holds_media(features: Mapping[str, Any]) -> bool:
    """Return whether there are images, sounds and the like, which may name files.

    Their content is part of the rows: the files may change, and workers may not have them.
    """
    inner: Any = importlib.import_module("datasets.features.features")
    return any(map(inner.require_storage_embed, features.values()))
