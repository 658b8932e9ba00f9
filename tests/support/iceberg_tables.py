"""Iceberg tables of a SQL catalog on SQLite, in a folder."""

from __future__ import annotations

import functools
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog, load_catalog, sql
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
)
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.typedef import Record

# An engine compiles each statement once, which takes longer than to execute it.
sql.create_engine = functools.lru_cache(8)(sql.create_engine)


def catalog_in(folder: Path) -> dict[str, str]:
    """Make a catalog with the namespace ``db``, and return its properties."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "catalog.db").write_bytes(_made())
    return {**_properties(folder), "init_catalog_tables": "false"}  # they exist


@functools.cache
def _made() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        opened(_properties(Path(folder))).create_namespace("db")
        return Path(folder, "catalog.db").read_bytes()


def _properties(folder: Path) -> dict[str, str]:
    return {
        "type": "sql",
        "name": "test",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
    }


def opened(properties: dict[str, str]) -> Catalog:
    given = dict(properties)
    return load_catalog(given.pop("name"), **given)


def delete_positions(
    table: Table, path: str, positions: Sequence[int], content: str = "position"
) -> None:
    """Commit a delete file for rows of a data file, as merge-on-read writers such as Spark do.

    pyiceberg reads such files and writes none.
    """
    file = f"{table.location()}/data/{uuid.uuid4()}-deletes.parquet"
    columns = {
        "file_path": pa.array([path] * len(positions)),
        "pos": pa.array(positions, pa.int64()),
    }
    with table.io.new_output(file).create() as stream:
        pq.write_table(pa.table(columns), stream)
    deletes = DataFile.from_args(
        content={
            "position": DataFileContent.POSITION_DELETES,
            "equality": DataFileContent.EQUALITY_DELETES,
        }[content],
        file_path=file,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=len(positions),
        file_size_in_bytes=len(table.io.new_input(file)),
        spec_id=0,
        equality_ids=[1] if content == "equality" else None,
    )

    class Writer(ManifestWriterV2):
        def content(self) -> ManifestContent:
            return ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    class Deletes(_FastAppendFiles):
        def _manifests(self) -> list[Any]:
            with Writer(
                self.spec(0), self.schema(), self.new_manifest_output(), self._snapshot_id, "null"
            ) as writer:
                writer.add(
                    ManifestEntry.from_args(
                        status=ManifestEntryStatus.ADDED,
                        snapshot_id=self._snapshot_id,
                        sequence_number=None,
                        file_sequence_number=None,
                        data_file=deletes,
                    )
                )
            return [writer.to_manifest_file(), *self._existing_manifests()]

    with table.transaction() as transaction, Deletes(Operation.DELETE, transaction, table.io):
        pass
    table.refresh()
