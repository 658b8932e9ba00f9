"""A busy or flaky S3: a file is seen whole or as it was before."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from moto.moto_server.threaded_moto_server import MotoRequestHandler
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

import vane_dagster as vd
from support.damage import quick  # noqa: F401  # fixture
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.part_file import PartTarget, read_part, write_part
from vane_dagster.storage.store import read_part_info

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
def bucket(faults: FaultyS3, s3: dict[str, Any], tmp_path: Path) -> StoragePath:
    """A folder of the server; drivers do not try again."""
    own = {"retries": {"max_attempts": 0}, "read_timeout": 1}
    options = {**s3, "endpoint_url": faults.url, "config_kwargs": own}
    folder = StoragePath(f"s3://lake/{tmp_path.name}", options)
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
        with pytest.raises(vd.errors.StoreError, match=r"cannot be written: .*retried sev"):
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
