"""Sources: where a pipeline's rows come from.

These names are for your own sources: subclass `Source` or `FileSource`, and pass the object to
`Pipeline(source=...)`. To add a source to this package, write a module with such a subclass, and
name it in `vane_dagster/__init__.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vane_dagster._lazy import public_names

if TYPE_CHECKING:
    from vane_dagster.sources.base import FragmentRule as FragmentRule
    from vane_dagster.sources.base import Listed as Listed
    from vane_dagster.sources.base import Source as Source
    from vane_dagster.sources.base import SourceReader as SourceReader
    from vane_dagster.sources.base import SourceTable as SourceTable
    from vane_dagster.sources.base import fragment_record as fragment_record
    from vane_dagster.sources.file_source import FileSource as FileSource
    from vane_dagster.sources.table_reader import TableReader as TableReader
    from vane_dagster.storage.manifest import FileRecord as FileRecord
    from vane_dagster.storage.manifest import FileSpan as FileSpan
    from vane_dagster.storage.manifest import FragmentRecord as FragmentRecord

__getattr__, __dir__ = public_names(__name__, __file__)
