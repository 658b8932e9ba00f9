"""The contract of sources, over each source of the package that needs no cluster."""

from __future__ import annotations

import io
import json
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from PIL import Image
from pyiceberg.expressions import EqualTo

import vane_dagster as vd

# F403: all tests of the contract run here, over each source.
from support.iceberg_tables import catalog_in, opened
from support.source_contract import *  # noqa: F403  # the contract's tests
from support.source_contract import Kept
from vane_dagster._lazy import LazyModule
from vane_dagster.sources.ingested_files import IngestedSource
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store

DATASETS = LazyModule("datasets")


def ids(table: pa.Table) -> list[int]:
    return [int(value) for value in table["n"].to_pylist()]


def texts(table: pa.Table) -> list[int]:
    return [int(value) for value in table["text"].to_pylist()]


def stems(table: pa.Table) -> list[int]:
    return [int(Path(value).stem) for value in table["path"].to_pylist()]


def rows(numbers: Sequence[int]) -> pa.Table:
    return pa.table(
        {
            "n": pa.array(numbers, pa.int64()),
            "s": pa.array([f"s{n}" for n in numbers], pa.string()),
        }
    )


def parquet(numbers: Sequence[int]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(rows(numbers), sink)
    return sink.getvalue()


def png(number: int) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (2, 2), (number, 0, 0)).save(sink, "png")
    return sink.getvalue()


def one(name: str, encode: Callable[[Sequence[int]], bytes]) -> Any:
    return lambda numbers: {name: encode(numbers)}


def lines(line: Callable[[int], str], head: str = "") -> Callable[[Sequence[int]], bytes]:
    return lambda numbers: (head + "".join(f"{line(n)}\n" for n in numbers)).encode()


FILES: dict[str, tuple[Any, Any, Any]] = {
    "parquet": (vd.parquet, one("a.parquet", parquet), ids),
    "csv": (vd.csv, one("a.csv", lines(lambda n: f"{n},s{n}", "n,s\n")), ids),
    "json": (vd.json, one("a.jsonl", lines(lambda n: json.dumps({"n": n, "s": str(n)}))), ids),
    "text": (vd.text, one("a.txt", lines(str)), texts),
    "files": (vd.files, lambda numbers: {f"{n:03d}.bin": b"x" for n in numbers}, stems),
    "images": (vd.images, lambda numbers: {f"{n:03d}.png": png(n) for n in numbers}, stems),
}


def files(kind: str, root: str) -> Kept:
    make, encode, numbers = FILES[kind]

    def write(key: str, values: Sequence[int]) -> None:
        folder = StoragePath(root).child(key)
        folder.delete(list(folder.names()))
        for name, data in encode(values).items():
            folder.write(name, data)

    source = make(f"{root}/{{partition_key}}")
    if not isinstance(source, IngestedSource):
        return Kept(source, write, numbers)
    store = Store(StoragePath(tempfile.mkdtemp()))
    return Kept(source, write, numbers, lambda source: source.bind(store), True)


def delta(folder: Path) -> Kept:
    def write(key: str, values: Sequence[int]) -> None:
        write_deltalake(folder / key, rows(values), mode="overwrite")

    return Kept(vd.delta(f"{folder}/{{partition_key}}"), write, ids, is_snapshot=True)


def lance_tables(folder: Path) -> Kept:
    def write(key: str, values: Sequence[int]) -> None:
        lance.write_dataset(rows(values), f"{folder}/{key}", mode="overwrite")

    return Kept(vd.lance(f"{folder}/{{partition_key}}"), write, ids, is_snapshot=True)


def iceberg(folder: Path) -> Kept:
    catalog = catalog_in(folder)
    schema = rows([]).schema.append(pa.field("key", pa.string()))
    table = opened(catalog).create_table("db.t", schema)
    written: set[str] = set()

    def write(key: str, values: Sequence[int]) -> None:
        made = rows(values).append_column("key", pa.array([key] * len(values)))
        if key in written:
            table.delete(EqualTo("key", key))
        written.add(key)
        table.append(made.cast(schema))

    source = vd.iceberg(catalog, "db.t", filter="key = '{partition_key}'")
    return Kept(source, write, ids, is_snapshot=True)


def in_memory(make: Callable[[pa.Table], Any], folder: Path) -> Kept:
    store = Store(StoragePath(str(folder / "store")))
    held: dict[str, Sequence[int]] = {}

    def write(key: str, values: Sequence[int]) -> None:
        held[key] = values

    def restart() -> Any:
        return make(
            pa.concat_tables(
                rows(values).append_column("key", pa.array([key] * len(values)))
                for key, values in held.items()
            )
        )

    empty = make(rows([0]).append_column("key", pa.array(["-"])))
    bind = lambda source: source.bind(store)  # noqa: E731 - of one line, for this case alone
    return Kept(empty, write, ids, bind, True, restart)


MAKERS: dict[str, Callable[[Path], Kept]] = {
    **{kind: lambda folder, kind=kind: files(kind, str(folder)) for kind in FILES},
    **{
        f"{kind} in memory": lambda _, kind=kind: files(kind, f"memory://{uuid.uuid4().hex}")
        for kind in ("parquet", "csv", "images")
    },
    "delta": delta,
    "lance": lance_tables,
    "iceberg": iceberg,
    "table": lambda folder: in_memory(lambda made: vd.table(made, partition_column="key"), folder),
    "huggingface": lambda folder: in_memory(
        lambda made: vd.huggingface(DATASETS.Dataset(made), partition_column="key"),
        folder,
    ),
}


@pytest.fixture(params=MAKERS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    """Each source in turn, with an empty place for its data."""
    return MAKERS[request.param](tmp_path / "data")
