"""Tables of each format of a lake, with one interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import vane_dagster as vd
from support import delta_tables, iceberg_tables


def made(ids: Any, **more: Any) -> pa.Table:
    ids = list(ids)
    columns = {"id": pa.array(ids, pa.int64()), "n": pa.array([i * 10 for i in ids], pa.int32())}
    return pa.table({**columns, "text": pa.array([f"text {i}" for i in ids], pa.string()), **more})


class Delta:
    version = "version"
    no_such_version = "Check the version"

    def __init__(self, root: Path) -> None:
        self.url = f"{root}/lake table"
        self.name = self.url

    def source(self, **given: Any) -> Any:
        return vd.delta(self.url, **given)

    def append(self, table: pa.Table, **given: Any) -> None:
        write_deltalake(self.url, table, mode="append", **given)

    def files(self) -> list[str]:
        actions = delta_tables.log_actions(Path(self.url), "add")
        return [f"file://{self.url}/{action['path']}" for action in actions]

    def delete(self, positions: Any) -> None:
        path = self.files()[0].rpartition("/")[2]
        delta_tables.delete_positions(Path(self.url), path, positions)

    def add_column(self, name: str) -> None:
        self.append(made([100], **{name: ["e"]}), schema_mode="merge")

    def now(self) -> Any:
        return DeltaTable(self.url).version()


class Lance(Delta):
    no_such_version = "does not exist, or does not have the given version"

    def source(self, **given: Any) -> Any:
        return vd.lance(self.url, **given)

    def append(self, table: pa.Table, **given: Any) -> None:
        lance.write_dataset(table, self.url, mode="append", **given)

    def files(self) -> list[str]:
        fragments = lance.dataset(self.url).get_fragments()
        return [f"{self.url}/data/{each.metadata.files[0].path}" for each in fragments]

    def delete(self, positions: Any) -> None:
        lance.dataset(self.url).delete(f"id in ({', '.join(map(str, positions))})")

    def add_column(self, name: str) -> None:
        lance.dataset(self.url).add_columns({name: "'e'"})

    def now(self) -> Any:
        return lance.dataset(self.url).version


class Iceberg(Delta):
    version = "snapshot"
    no_such_version = "has no snapshot 17"

    def __init__(self, root: Path) -> None:
        self.catalog = iceberg_tables.catalog_in(root / "lake")
        self.opened = iceberg_tables.opened(self.catalog)
        self.name = "test.db.docs"

    @property
    def table(self) -> Any:
        return self.opened.load_table("db.docs")

    def source(self, **given: Any) -> Any:
        return vd.iceberg(self.catalog, "db.docs", **given)

    def append(self, table: pa.Table, **given: Any) -> None:
        self.opened.create_table_if_not_exists("db.docs", table.schema).append(table)

    def files(self) -> list[str]:
        files = [task.file for task in self.table.scan().plan_files()]
        return [file.file_path for file in sorted(files, key=lambda f: f.lower_bounds[1])]

    def delete(self, positions: Any) -> None:
        iceberg_tables.delete_positions(self.table, self.files()[0], positions)

    def add_column(self, name: str) -> None:
        from pyiceberg.types import StringType

        with self.table.update_schema() as update:
            update.add_column(name, StringType())

    def now(self) -> Any:
        return self.table.current_snapshot().snapshot_id


FORMATS = {"delta": Delta, "iceberg": Iceberg, "lance": Lance}


@pytest.fixture(params=FORMATS)
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return FORMATS[request.param](tmp_path)
