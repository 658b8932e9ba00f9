"""In-memory forms of rows: tables, frames, relations and datasets of several libraries.

A form is recognized by its type's module and name, which imports only what the user imported.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from vane_dagster._lazy import pq
from vane_dagster._private_folder import user_folder
from vane_dagster._texts import in_partition
from vane_dagster.errors import StoreError, first_line
from vane_dagster.storage.damage import is_damage, verified
from vane_dagster.storage.packed_tensors import may_be_packed, schema_of_file, unpacked
from vane_dagster.storage.reader import StoredRows
from vane_dagster.types.casts import cast_table
from vane_dagster.types.duckdb_connection import spill_below
from vane_dagster.types.frames import to_pandas, to_polars
from vane_dagster.types.host_arrays import is_pandas, no_arrow_type
from vane_dagster.types.schema import empty_table, plain_type, seen_by_sql
from vane_dagster.types.tensors import as_storage, holds_tensors

_BATCH = 65_536

NEEDS_RAY = "ray.data.Dataset"


def form_of(kind: Any) -> str | None:
    """Return the form of a type; None for another type."""
    package = str(getattr(kind, "__module__", "")).partition(".")[0].lstrip("_")
    return _FORMS.get((package, str(getattr(kind, "__qualname__", ""))))


def form_of_value(value: Any) -> str | None:
    """Return the form of an object, including subclasses of a form's type; None for other types."""
    return next((form for kind in type(value).__mro__ if (form := form_of(kind))), None)


def known_forms() -> str:
    """List the forms, for messages."""
    return ", ".join(_LOADERS)


def loaded(rows: StoredRows, form: str) -> Any:
    """Load rows in a form. Datasets, lazy frames, relations and readers read files on use.

    Rows with tensors are read at once, but by readers and Ray Data.
    """
    try:
        return _LOADERS[form](rows)
    except ImportError as error:
        package = "ray[data]" if form == NEEDS_RAY else form.partition(".")[0]
        raise StoreError(
            f"{rows.label!r} cannot be read as {form}: {first_line(error)}. pip install {package!r}"
        ) from error


def batches(value: Any, label: str) -> pa.RecordBatchReader:
    """Read the rows of an object, batch by batch; lazy forms are read on demand.

    Each type gets one encoding: large strings become strings, dictionaries their values.
    """
    form, kind = form_of_value(value), type(value)
    if form is None:
        raise StoreError(
            f"{label} returned a {kind.__module__}.{kind.__qualname__}; expected one of "
            f"{known_forms()}, or nothing by a function with -> None"
        )
    if form == "pandas.DataFrame":
        value = _with_named_index(value)
    for column, dtype in _dtypes(value).items():
        if reason := no_arrow_type(dtype):
            raise StoreError(f"{label}: column {column!r} is {dtype}, {reason}")
    schema, pieces = _READERS[form](value)
    plain = pa.schema([pa.field(f.name, plain_type(f.type)) for f in schema])
    repeated = {name for name in plain.names if plain.names.count(name) > 1}
    if repeated or not plain.names:
        raise StoreError(
            f"{label}: columns are {plain.names}; expected one or more with distinct names"
        )
    return pa.RecordBatchReader.from_batches(plain, _cast(pieces, plain, label))


def _cast(pieces: Iterable[Any], schema: pa.Schema, label: str) -> Iterator[pa.RecordBatch]:
    for piece in pieces:
        table = pa.Table.from_batches([piece]) if isinstance(piece, pa.RecordBatch) else piece
        try:
            table = cast_table(table, schema)
        except (pa.ArrowException, KeyError) as error:
            raise StoreError(
                f"{label}: rows do not have the declared columns: {first_line(error)}; "
                f"expected {schema.to_string()}"
            ) from error
        yield from table.to_batches()


def _table(rows: StoredRows) -> pa.Table:
    try:
        return pa.concat_tables(_pieces(rows)) if _has_bytes(rows) else _files(rows).to_table()
    except Exception as error:
        if isinstance(error, FileNotFoundError) or is_damage(error):
            raise _of_damage(rows, error) from error
        raise


def _of_damage(rows: StoredRows, error: Exception) -> StoreError:
    """Return the error for files that cannot be read, which names the first of them."""
    where = ""
    for fs, path, partition in rows.files:
        try:
            with fs.open(path, "rb") as file:
                pq.read_table(file, page_checksum_verification=True)
        except Exception:  # storage errors too: this is the file that fails
            where = f"{in_partition(partition)}, file {fs.unstrip_protocol(path)!r}"
            break
    return StoreError(
        f"{rows.label!r}{where}: a file is damaged or gone, and cannot be read: "
        f"{type(error).__name__}: {first_line(error)}. Materialize {rows.label!r} again with force"
    )


def _has_bytes(rows: StoredRows) -> bool:
    """Return whether files may have tensors as bytes, so that only this package reads them."""
    return bool(rows.files) and may_be_packed(rows.schema)


def _pieces(rows: StoredRows) -> Iterator[pa.Table]:
    """Read rows file by file."""
    for file in _files(rows).get_fragments():
        schema = schema_of_file(rows.schema, file.physical_schema)
        yield unpacked(file.to_table(schema=schema, columns=schema.names), rows.schema)


def _reader(rows: StoredRows) -> pa.RecordBatchReader:
    if not _has_bytes(rows):
        return _files(rows).scanner().to_reader()
    record_batches = (batch for piece in _pieces(rows) for batch in piece.to_batches())
    return pa.RecordBatchReader.from_batches(rows.schema, record_batches)


def _dataset(rows: StoredRows) -> Any:
    import pyarrow.dataset as ds

    return ds.dataset(_table(rows)) if _has_bytes(rows) else _files(rows)


def _files(rows: StoredRows) -> Any:
    import pyarrow.dataset as ds  # imports pandas if it is installed

    if not rows.files:
        return ds.dataset(empty_table(rows.schema))
    # Without this, folders named after keys such as "day=1" would become columns.
    make = functools.partial(ds.dataset, schema=rows.schema, format=verified(), partitioning=None)
    by_system = itertools.groupby(rows.files, lambda file: file.fs)
    datasets = [make([file.path for file in files], filesystem=fs) for fs, files in by_system]
    if rows.partition_column:
        field, keys = ds.field(rows.partition_column), iter(rows.files)
        datasets = [
            ds.FileSystemDataset.from_paths(
                each.files,
                schema=each.schema,
                format=each.format,
                filesystem=each.filesystem,
                partitions=[
                    field.is_null() if key is None else field == key
                    for _, _, key in itertools.islice(keys, len(each.files))
                ],
            )
            for each in datasets
        ]
    return datasets[0] if len(datasets) == 1 else ds.dataset(datasets)


def _pandas(rows: StoredRows) -> Any:
    importlib.import_module("pandas")  # pyarrow's own error does not name the package
    return to_pandas(_table(rows))


def _polars(rows: StoredRows) -> Any:
    return to_polars(_table(rows))


def _polars_lazy(rows: StoredRows) -> Any:
    pl: Any = importlib.import_module("polars")
    if not rows.files or any(holds_tensors(field.type) for field in rows.schema):
        return _polars(rows).lazy()
    return pl.scan_pyarrow_dataset(_dataset(rows))


def _relation(rows: StoredRows) -> Any:
    duckdb: Any = importlib.import_module("duckdb")
    seen = [(field.name, seen_by_sql(field.type)) for field in rows.schema]
    for name, kind in seen:
        if kind is None:
            raise StoreError(
                f"{rows.label!r}: column {name!r} is {rows.schema.field(name).type}, which DuckDB "
                "would read as another type; select other columns with columns=, or read another "
                "form"
            )
    connection = duckdb.connect()  # the relation keeps it open
    connection.execute("SET TimeZone='UTC'")
    spill_below(connection, user_folder("spill"))
    if any(holds_tensors(field.type) for field in rows.schema):
        columns = {
            field.name: as_storage(column) for field, column in zip(rows.schema, _table(rows))
        }
        return connection.from_arrow(cast_table(pa.table(columns), pa.schema(seen)))
    return connection.from_arrow(_files(replace(rows, schema=pa.schema(seen))))


def _ray_dataset(rows: StoredRows) -> Any:
    ray: Any = importlib.import_module("ray")
    data: Any = importlib.import_module("ray.data")
    importlib.import_module("pandas")  # ray.data needs it and imports it late
    if not ray.is_initialized():
        raise StoreError(
            f"{rows.label!r} cannot be read as {NEEDS_RAY}: this process is not connected to Ray. "
            "Call ray.init(), or vane_dagster.LocalCluster().connect(), first"
        )
    if not rows.files:
        return data.from_arrow(empty_table(rows.schema))
    files = data.range(len(rows.files))
    return files.map_batches(_of_files, fn_args=(rows,), batch_format="pyarrow", batch_size=1)


def _of_files(batch: pa.Table, rows: StoredRows) -> pa.Table:
    return _table(replace(rows, files=tuple(rows.files[n] for n in batch.column("id").to_pylist())))


_LOADERS: Mapping[str, Any] = {
    "pyarrow.Table": _table,
    "pyarrow.dataset.Dataset": _dataset,
    "pyarrow.RecordBatchReader": _reader,
    "pandas.DataFrame": _pandas,
    "polars.DataFrame": _polars,
    "polars.LazyFrame": _polars_lazy,
    "duckdb.DuckDBPyRelation": _relation,
    "ray.data.Dataset": _ray_dataset,
}

_FORMS = {(form.partition(".")[0], form.rpartition(".")[2]): form for form in _LOADERS}
"""The names of the forms, by package and name of the type."""
_Batches = tuple[pa.Schema, Iterable[Any]]


def _dtypes(frame: Any) -> Mapping[Any, Any]:
    """Return the types of the columns of a frame of pandas or polars; none of another form."""
    if hasattr(frame, "collect_schema"):
        return dict(frame.collect_schema())
    return dict(frame.dtypes) if is_pandas(frame) else {}


def _of_reader(reader: pa.RecordBatchReader) -> _Batches:
    return reader.schema, reader


def _with_named_index(frame: Any) -> Any:
    """Return a pandas frame whose index is a column if it has a name."""
    named = [name for name in frame.index.names if name is not None]
    return frame.reset_index(level=named) if named else frame


def _of_pandas(frame: Any) -> _Batches:
    """Read a pandas frame without its index."""
    return _of_reader(pa.Table.from_pandas(frame, preserve_index=False).to_reader())


def _of_polars_lazy(frame: Any) -> _Batches:
    empty = frame.collect_schema().to_frame().to_arrow()
    return empty.schema, (piece.to_arrow() for piece in frame.collect_batches(lazy=True))


def _of_ray(dataset: Any) -> _Batches:
    schema = dataset.schema()
    base = getattr(schema, "base_schema", None)
    if not isinstance(base, pa.Schema):
        pieces = list(dataset.iter_batches(batch_format="pyarrow", batch_size=None))
        base = pieces[0].schema if pieces else pa.schema([])
        return base, pieces
    return base, dataset.iter_batches(batch_format="pyarrow", batch_size=_BATCH)


_READERS: Mapping[str, Any] = {
    "pyarrow.Table": lambda table: _of_reader(table.to_reader()),
    "pyarrow.dataset.Dataset": lambda dataset: _of_reader(dataset.scanner().to_reader()),
    "pyarrow.RecordBatchReader": _of_reader,
    "pandas.DataFrame": _of_pandas,
    "polars.DataFrame": lambda frame: _of_reader(frame.to_arrow().to_reader()),
    "polars.LazyFrame": _of_polars_lazy,
    "duckdb.DuckDBPyRelation": lambda relation: _of_reader(relation.to_arrow_reader(_BATCH)),
    "ray.data.Dataset": _of_ray,
}
