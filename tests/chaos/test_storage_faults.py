"""Storage that fails: a full disk, no permission, a busy or flaky S3, damaged files.

Whatever happens, a partition is seen whole or as it was before, and the next run puts it right.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.moto_server.threaded_moto_server import MotoRequestHandler
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

import vane_dagster as vd
from support.damage import (
    cut,
    flip,
    parts,
    quick,  # noqa: F401  # fixtures
)
from support.data import read_stage, write_source
from support.results import failure, metadata, over
from vane_dagster.engine import committer
from vane_dagster.storage.damage import damage_of
from vane_dagster.storage.filesystem import TEMPORARY, Location
from vane_dagster.storage.part_file import PartTarget, read_part, write_part
from vane_dagster.storage.publish.base import publish as committer_publish
from vane_dagster.storage.store import read_part_info

ROWS = 30


def double(batch: pa.Table) -> pa.Table:
    return pa.table({"y": [2 * x for x in batch["x"].to_pylist()]})


def negate(batch: pa.Table) -> pa.Table:
    return pa.table({"z": [-y for y in batch["y"].to_pylist()]})


def make(tmp_path: Path) -> vd.Pipeline:
    """source -> clean -> double -> negate, three fragments of ten rows."""
    docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=10)
    clean = docs.project("clean", ["x", "note"])
    doubled = clean.map_batches("double", double, schema={"y": "BIGINT"})
    doubled.map_batches("negate", negate, schema={"z": "BIGINT"})
    return docs


def rows(ids: range, xs: range | None = None) -> dict[str, Any]:
    """Rows whose text takes most of the file."""
    return {"id": ids, "x": xs or ids, "note": [f"{i:04}" * 50 for i in ids]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    whole = rows(range(ROWS))
    return write_source(tmp_path / "src", whole, row_group_size=10, compression="none")


def edit(tmp_path: Path) -> None:
    write_source(tmp_path / "src", rows(range(ROWS), range(1, ROWS + 1)))


def rows_of(tmp_path: Path, stage: str, column: str) -> list[int]:
    return read_stage(tmp_path / "store", "docs", stage)[column].to_pylist()


DOUBLED = [2 * x for x in range(ROWS)]
NEGATED = [-y for y in DOUBLED]


def manifests(tmp_path: Path) -> dict[str, bytes]:
    found = (tmp_path / "store").rglob("manifests/*/*.json")
    return {str(path): path.read_bytes() for path in found}


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as opened:
        yield opened


def warnings_of(result: dg.ExecuteInProcessResult, instance: dg.DagsterInstance) -> str:
    logs = instance.all_logs(result.run_id)
    return "\n".join(log.user_message for log in logs if log.level == logging.WARNING)


# Full disks and permissions


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "store"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root, and not in every container")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk(tiny, tmp_path, source, local, materialize):
    materialize(make(tmp_path), local)
    before = manifests(tmp_path)
    edit(tmp_path)
    filling = tiny / "filling"
    fill(filling)

    message = failure(materialize(make(tmp_path), local, raises=False))
    assert "No space left on device" in message
    assert "The disk is full: free space there" in message
    assert str(tiny) in message
    assert manifests(tmp_path) == before
    assert rows_of(tmp_path, "negate", "z") == NEGATED
    assert not list(tiny.rglob(f"{TEMPORARY}*"))

    filling.unlink()
    materialize(make(tmp_path), local)
    assert rows_of(tmp_path, "negate", "z") == [-2 * x for x in range(1, ROWS + 1)]


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
def test_damaged_parts_are_computed_again_by_the_next_run(
    harm, tmp_path, source, local, materialize, instance
):
    """Two of them, of a stage whose partition is in force, read by the stage below."""
    materialize(make(tmp_path), local, select=["clean", "double"])
    harmed = [parts(tmp_path, "double")[i] for i in (0, 2)]
    whole = {path: path.read_bytes() for path in harmed}
    others = {p: p.stat().st_mtime_ns for p in parts(tmp_path, "double") if p not in harmed}
    before = manifests(tmp_path)
    for path in harmed:
        harm(path)
    if harm is not Path.unlink:  # a part that is not there is seen by the planner
        result = materialize(make(tmp_path), local, instance=instance, raises=False)
        assert "It was removed from the stage 'docs/double'" in failure(result)
        warnings = warnings_of(result, instance)
        assert [warnings.count(path.name) for path in harmed] == [1, 1]
    result = materialize(make(tmp_path), local, instance=instance)
    assert rows_of(tmp_path, "double", "y") == DOUBLED
    assert rows_of(tmp_path, "negate", "z") == NEGATED
    assert {path: pq.read_table(path) for path in harmed} == {
        path: pq.read_table(pa.BufferReader(data)) for path, data in whole.items()
    }
    assert {p: p.stat().st_mtime_ns for p in others} == others
    assert manifests(tmp_path).items() >= before.items()
    assert metadata(result, "negate")["dagster/row_count"] == ROWS


def test_a_damaged_part_above_a_damaged_part(tmp_path, source, local, materialize):
    """To make the one again the other is read, which turns out to be damaged too."""
    materialize(make(tmp_path), local, select=["clean", "double"])
    flip(parts(tmp_path, "double")[1])
    for path in parts(tmp_path, "clean"):
        flip(path, "x")
    for _ in range(2):
        assert not materialize(make(tmp_path), local, raises=False).success
    materialize(make(tmp_path), local)
    assert rows_of(tmp_path, "negate", "z") == NEGATED
    assert sum(damage_of(Location(str(p.parent)), p.name) is None
               for p in parts(tmp_path, "double")) == 3  # fmt: skip


def test_partitions_that_wait_for_a_damaged_one_are_committed(tmp_path, local, materialize):
    """A check that compares partitions commits them in order: the second waits for the first."""
    for key, first in (("a", 0), ("b", 100)):
        write_source(tmp_path / "src" / key, rows(range(first, first + ROWS)))
    docs = vd.Pipeline(
        "docs",
        source=vd.parquet(f"{tmp_path}/src/{{partition_key}}"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
    )
    drift = vd.Asset(checks=[vd.checks.Drift("y")])
    clean = docs.project("clean", ["x", "note"])
    clean.map_batches("double", double, schema={"y": "BIGINT"}, asset=drift)

    def run(*select: str) -> bool:
        return materialize(docs, local, select=select, raises=False, **over("a", "b")).success

    run("clean")
    (harmed,) = (tmp_path / "store/docs/clean/parts/a").glob("*.parquet")
    flip(harmed, "x")
    assert not run("clean", "double")
    expected = {"a": DOUBLED, "b": [200 + y for y in DOUBLED]}
    table = read_stage(tmp_path / "store", "docs", "double", "b")
    assert table["y"].to_pylist() == expected["b"]
    assert run("clean", "double")
    for key in "ab":
        table = read_stage(tmp_path / "store", "docs", "double", key)
        assert table["y"].to_pylist() == expected[key]


def test_a_damaged_part_of_a_stage_that_is_not_selected(tmp_path, source, local, materialize):
    materialize(make(tmp_path), local, select=["clean", "double"])
    victim = parts(tmp_path, "double")[1]
    flip(victim)
    damaged = (
        rf"'docs/double', file '\S+{victim.name}': .*Materialize 'docs/double' again with force"
    )
    with pytest.raises(vd.errors.StoreError, match=damaged):
        vd.load("docs/double", store=str(tmp_path / "store"))
    before = manifests(tmp_path)
    message = failure(materialize(make(tmp_path), local, select=["negate"], raises=False))
    assert victim.name in message
    assert "It was removed from the stage 'docs/double'" in message
    assert "Materialize 'double' again" in message
    assert not victim.exists()
    assert manifests(tmp_path) == before

    materialize(make(tmp_path), local, select=["double", "negate"])
    assert rows_of(tmp_path, "negate", "z") == NEGATED


def test_a_part_that_nobody_names_yet_is_passed_over(
    tmp_path, source, local, materialize, instance
):
    """What a killed run has left, found by the planner."""
    materialize(make(tmp_path), local)
    for path in manifests(tmp_path):
        if "/double/" in path:
            Path(path).unlink()
    cut(parts(tmp_path, "double")[0])
    result = materialize(make(tmp_path), local, instance=instance)
    assert metadata(result, "double")["fragments_computed"] == 1
    assert rows_of(tmp_path, "double", "y") == DOUBLED
    assert "is damaged and cannot be read" in warnings_of(result, instance)
    assert "It is computed again" in warnings_of(result, instance)


def test_a_damaged_part_that_a_commit_reads(tmp_path, source, local, materialize, monkeypatch):
    """What was published before stays, the part is removed, and the next run repairs it."""
    docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=10)
    docs.project("clean", ["x"]).write("out", f"{tmp_path}/out", target_file_bytes=1 << 20)
    materialize(docs, local)
    before = {path.name for path in (tmp_path / "out").glob("*.parquet")}
    edit(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(committer, "publish", harming(tmp_path / "out/_vane_staging"))
        message = failure(materialize(docs, local, raises=False))
    assert "could not be committed" in message
    assert "is damaged and cannot be read" in message
    assert "it was removed. Run again, and it is computed again" in message
    assert {path.name for path in (tmp_path / "out").glob("*.parquet")} == before
    assert vd.load("docs/out", store=str(tmp_path / "store"))["x"].to_pylist() == [*range(ROWS)]

    result = materialize(docs, local)
    assert metadata(result, "out")["fragments_computed"] == 1
    read = vd.load("docs/out", store=str(tmp_path / "store"))
    assert read["x"].to_pylist() == [*range(1, ROWS + 1)]


def harming(staging: Path) -> Callable[..., Any]:
    def publish(*given: Any) -> Any:
        flip(sorted(staging.glob("*.staged"))[1], "x")
        return committer_publish(*given)

    return publish


# Damaged source files


def test_a_source_file_with_a_damaged_page(tmp_path, local, materialize):
    """Its footer is whole: it is found in a worker, and what is made of other files is kept."""
    write_source(tmp_path / "src", rows(range(ROWS)), "a.parquet")
    more = rows(range(100, 100 + ROWS), range(ROWS))
    bad = write_source(tmp_path / "src", more, "b.parquet", use_dictionary=False)
    whole = bad.read_bytes()
    place = pq.read_metadata(bad).row_group(0).column(1).data_page_offset
    bad.write_bytes(whole[:place] + bytes(20) + whole[place + 20 :])
    message = failure(materialize(make(tmp_path), local, raises=False))
    assert "stage 'docs/clean', fragment" in message
    assert re.search(r"b\.parquet' cannot be read: .*Write it again", message)
    assert not manifests(tmp_path)
    bad.write_bytes(whole)
    materialize(make(tmp_path), local)
    assert rows_of(tmp_path, "double", "y") == [*DOUBLED, *DOUBLED]


# An S3 that fails

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>slow</Message></Error>"


class FaultyS3:
    """An S3 server that fails requests, each rule as often as it says.

    Attributes:
        rules: Method, a word of the path, what happens, and how often.
        done: What has happened.
    """

    url: str

    def __init__(self) -> None:
        self.rules: list[tuple[str, str, str, int]] = []
        self.done: list[str] = []
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()

    def fail(self, kind: str, times: int, method: str, word: str = "") -> None:
        self.rules.append((method, word, kind, times))

    def _next(self, method: str, path: str) -> str:
        with self._lock:
            for number, (wanted, word, kind, times) in enumerate(self.rules):
                if times and wanted == method and word in path:
                    self.rules[number] = (wanted, word, kind, times - 1)
                    self.done.append(kind)
                    return kind
        return ""

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterator[bytes]:
        kind = self._next(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if kind == "cut":  # in the middle of what it is sent
            environ["wsgi.input"].read(100)
            self._hang_up(environ)
        elif kind == "503":
            start("503 Slow Down", [("Content-Type", "application/xml")])
            yield SLOW_DOWN
            return
        elif kind == "late":
            time.sleep(2)
        data = b"".join(self._app(environ, start))
        if kind == "half":  # of what it answers
            yield data[: len(data) // 2]
            self._hang_up(environ)
        yield data

    def _hang_up(self, environ: dict[str, Any]) -> None:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError


@pytest.fixture
def faults() -> Iterator[FaultyS3]:
    found = FaultyS3()
    options = {"threaded": True, "request_handler": MotoRequestHandler}
    server = make_server("127.0.0.1", 0, found, **options)
    found.url = f"http://127.0.0.1:{server.port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def bucket(faults: FaultyS3, s3: dict[str, Any], tmp_path: Path) -> Location:
    """A folder of the server; drivers do not try again."""
    own = {"retries": {"max_attempts": 0}, "read_timeout": 1}
    options = {**s3, "endpoint_url": faults.url, "config_kwargs": own}
    folder = Location(f"s3://lake/{tmp_path.name}", options)
    folder.fs.retries = 1  # those of s3fs
    return folder


@pytest.mark.parametrize("kind", ["503", "cut", "late"])
@pytest.mark.usefixtures("quick")
def test_a_write_goes_on_after_faults(kind, faults, bucket):
    data = os.urandom(300_000)
    faults.fail(kind, 2, "PUT", "/f")
    bucket.write("f", data)
    assert set(faults.done) == {kind}  # under load, fewer than two
    assert bucket.read("f") == data
    assert bucket.names() == {"f": len(data)}


@pytest.mark.usefixtures("quick")
def test_a_write_that_fails_for_good_leaves_what_was_there(faults, bucket):
    bucket.write("f", b"before")
    for kind in ("503", "cut"):
        faults.rules.clear()
        faults.done.clear()
        faults.fail(kind, 1000, "PUT", "/f")
        with pytest.raises(vd.errors.StoreError, match=r"cannot be written: .*tried several times"):
            bucket.write("f", bytes(300_000))
        assert len(faults.done) >= 4
        assert bucket.read("f") == b"before"
    assert bucket.names() == {"f": 6}


@pytest.mark.parametrize("kind", ["503", "half"])
@pytest.mark.usefixtures("quick")
def test_reads_and_listings_go_on_after_faults(kind, faults, bucket):
    info = write_part(pa.table({"id": range(5000)}), PartTarget(bucket, "a" * 40, "id"))
    faults.fail(kind, 2, "GET")
    assert bucket.names().keys() == {info.name}
    faults.fail(kind, 2, "GET", info.name)
    assert read_part(bucket, info.name).num_rows == 5000
    faults.fail(kind, 2, "GET", info.name)
    assert read_part_info(bucket, info.name) == info
    faults.fail("503", 2, "DELETE")
    faults.fail("503", 2, "POST")
    bucket.delete([info.name])
    assert bucket.names() == {}
