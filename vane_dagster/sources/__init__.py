"""Sources: where a pipeline's rows come from.

To add a source to the package, write a module with a subclass of `Source` and name it here.
`vane_dagster/__init__.py` gives it a public name. To add a source in
your own code, subclass `Source` or `FileSource` and pass the object to `Pipeline(source=...)`.

`stored` and the sources that subclass `StoredTableSource` are not named here: they list
through the store, or hold rows, and run in the driver alone. Workers get their readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vane_dagster._lazy import public_names

if TYPE_CHECKING:
    from vane_dagster.sources.avro_files import AvroSource as AvroSource
    from vane_dagster.sources.base import FragmentRule as FragmentRule
    from vane_dagster.sources.base import Listed as Listed
    from vane_dagster.sources.base import ReadContext as ReadContext
    from vane_dagster.sources.base import Source as Source
    from vane_dagster.sources.base import SourceReader as SourceReader
    from vane_dagster.sources.base import SourceTable as SourceTable
    from vane_dagster.sources.base import fragment_record as fragment_record
    from vane_dagster.sources.csv_files import CsvSource as CsvSource
    from vane_dagster.sources.delta import DeltaSource as DeltaSource
    from vane_dagster.sources.file_source import FileSource as FileSource
    from vane_dagster.sources.iceberg import IcebergSource as IcebergSource
    from vane_dagster.sources.images import ImagesSource as ImagesSource
    from vane_dagster.sources.json_files import JsonSource as JsonSource
    from vane_dagster.sources.lance import LanceSource as LanceSource
    from vane_dagster.sources.parquet import ParquetSource as ParquetSource
    from vane_dagster.sources.raw_files import FilesSource as FilesSource
    from vane_dagster.sources.table_reader import TableReader as TableReader
    from vane_dagster.sources.text_files import TextSource as TextSource
    from vane_dagster.storage.manifest import FileRecord as FileRecord
    from vane_dagster.storage.manifest import FileSpan as FileSpan
    from vane_dagster.storage.manifest import FragmentRecord as FragmentRecord

_HOME = {
    "AvroSource": "avro_files",
    "CsvSource": "csv_files",
    "JsonSource": "json_files",
    "TextSource": "text_files",
    "DeltaSource": "delta",
    "FileRecord": "base",
    "FileSource": "file_source",
    "FilesSource": "raw_files",
    "FileSpan": "base",
    "FragmentRecord": "base",
    "FragmentRule": "base",
    "ImagesSource": "images",
    "Listed": "base",
    "IcebergSource": "iceberg",
    "LanceSource": "lance",
    "ParquetSource": "parquet",
    "ReadContext": "base",
    "Source": "base",
    "SourceReader": "base",
    "SourceTable": "base",
    "TableReader": "table_reader",
    "fragment_record": "base",
}

__all__ = [*_HOME]
__getattr__, __dir__ = public_names(__name__, _HOME)
