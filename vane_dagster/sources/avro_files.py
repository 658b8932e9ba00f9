"""`AvroSource`: Avro files, read by fastavro. It shows what a format needs: one file, a name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

import pyarrow as pa

from vane_dagster._arguments import check_installed
from vane_dagster._keywords import known_keywords
from vane_dagster.errors import described
from vane_dagster.sources.ingested_files import IngestedSource
from vane_dagster.sources.text_stream import TextStream
from vane_dagster.types.schema import SchemaLike

_TYPES = {
    "null": pa.null(), "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(),
    "float": pa.float32(), "double": pa.float64(), "bytes": pa.binary(), "string": pa.string(),
    "enum": pa.string(), "fixed": pa.binary(), "date": pa.date32(), "time-millis": pa.time32("ms"),
    "time-micros": pa.time64("us"), "timestamp-millis": pa.timestamp("ms", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"), "local-timestamp-millis": pa.timestamp("ms"),
    "local-timestamp-micros": pa.timestamp("us"),
}  # fmt: skip


@dataclass(frozen=True)
class AvroSource(IngestedSource):
    """Avro files that match a URL pattern for each partition; see `avro`."""

    kind: ClassVar[str] = "avro"
    suffix: ClassVar[str] = ".avro"
    is_text: ClassVar[bool] = False

    def convert(self, stream: TextStream) -> Iterator[pa.Table]:
        import fastavro

        try:
            with stream.opened() as file:
                reader = fastavro.block_reader(file)
                schema = pa.schema(list(_type(reader.writer_schema)))
                yield schema.empty_table()
                for block in reader:
                    rows = [{k: _plain(v) for k, v in row.items()} for row in block]
                    yield pa.Table.from_pylist(rows, schema)
        except OSError:
            raise
        except Exception as error:  # of fastavro, and of what decompresses its blocks
            raise stream.refused(
                f"it cannot be read as Avro: {described(error)}. Write it again, or take it out"
            ) from error


@known_keywords("vd.avro")
def avro(
    url: str | os.PathLike[str],
    *,
    schema: SchemaLike | None = None,
    types: SchemaLike | None = None,
    include_paths: bool = False,
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> AvroSource:
    """Declare Avro files as a pipeline's source.

    The first run that needs a file converts it into Parquet in the store. Columns have the types of
    the files' schemas: records are structs, enums are text, and a union of null and another type is
    that type. Other unions are not read.

    Args:
        url: A path or fsspec URL: a file, a folder (every ``*.avro`` below it) or a glob, with
            ``{partition_key}`` or ``{partition_key.<dimension>}`` for a partitioned pipeline.
        schema: The columns of the source with their types; others are not read.
        types: The types of some columns, in place of those in the files.
        include_paths: Whether there is a column `path` with the file's path.
        asset: The Dagster asset that writes the files: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether files without any rows are accepted; an error by default.
        storage_options: Options of the fsspec file system, such as an S3 endpoint.

    Raises:
        DefinitionError: If an argument is wrong, or fastavro is not installed.
        SchemaError: If a type is unknown.
    """
    check_installed("vd.avro", "fastavro", "avro")
    return AvroSource.declared(
        url, schema, types, include_paths, asset, allow_empty, storage_options
    )


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, UUID) else value


def _type(schema: Any) -> pa.DataType:
    """Return the type of a parsed Avro schema."""
    if isinstance(schema, list):
        (schema,) = [each for each in schema if each != "null"]  # else it is not read
    if not isinstance(schema, dict):
        return _TYPES[schema]
    kind, logical = schema["type"], schema.get("logicalType", "")
    if logical == "decimal":
        return pa.decimal128(schema["precision"], schema.get("scale", 0))
    if kind == "record":
        return pa.struct([(each["name"], _type(each["type"])) for each in schema["fields"]])
    if kind == "array":
        return pa.list_(_type(schema["items"]))
    if kind == "map":
        return pa.map_(pa.string(), _type(schema["values"]))
    return _TYPES.get(logical) or _type(kind)
