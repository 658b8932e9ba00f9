"""Sources: where a pipeline's rows come from.

To add a source to the package, write a module with a subclass of `Source` and import it here, which
makes it available to workers. `vane_dagster/__init__.py` gives it a public name. To add a source in
your own code, subclass `Source` or `FileSource` and pass the object to `Pipeline(source=...)`.

`stored` and the sources that subclass `StoredTableSource` are not imported here: they list
through the store, or hold rows, and run in the driver alone. Workers get their readers.
"""

from vane_dagster.sources.avro_files import AvroSource
from vane_dagster.sources.base import (
    FragmentRule,
    Listed,
    ReadContext,
    Source,
    SourceReader,
    SourceTable,
    fragment_record,
)
from vane_dagster.sources.csv_files import CsvSource
from vane_dagster.sources.delta import DeltaSource
from vane_dagster.sources.file_source import FileSource
from vane_dagster.sources.iceberg import IcebergSource
from vane_dagster.sources.images import ImagesSource
from vane_dagster.sources.json_files import JsonSource
from vane_dagster.sources.lance import LanceSource
from vane_dagster.sources.parquet import ParquetSource
from vane_dagster.sources.raw_files import FilesSource
from vane_dagster.sources.table_reader import TableReader
from vane_dagster.sources.text_files import TextSource
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord

__all__ = [
    "AvroSource",
    "CsvSource",
    "JsonSource",
    "TextSource",
    "DeltaSource",
    "FileRecord",
    "FileSource",
    "FilesSource",
    "FileSpan",
    "FragmentRecord",
    "FragmentRule",
    "ImagesSource",
    "Listed",
    "IcebergSource",
    "LanceSource",
    "ParquetSource",
    "ReadContext",
    "Source",
    "SourceReader",
    "SourceTable",
    "TableReader",
    "fragment_record",
]
