"""Secrets, and a server that rejects them."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.sax.saxutils import escape

import pyarrow as pa
import pytest
from pydantic import SecretStr


def planted() -> str:
    return f"planted{uuid.uuid4().hex}"


class Client:
    """A model with a login, which appears in its error."""

    def __init__(self, api_key: str, wrapped: SecretStr, fails: str = "") -> None:
        assert isinstance(wrapped, SecretStr)
        self.login = f"{api_key} {wrapped.get_secret_value()} {os.environ['DEPLOYMENT']}"
        self.fails = fails
        if fails == "constructor":
            raise RuntimeError(f"refused: {self.login}")

    def __call__(self, batch: pa.Table, password: str) -> pa.Table:
        if self.fails == "call" and 3 in batch["id"].to_pylist():
            variables = {name: value for name, value in os.environ.items() if "DEPLOY" in name}
            raise ValueError(f"cannot call with {self.login}, {password}, {variables}")
        return pa.table({"y": [len(self.login)] * len(batch)})


class Answers(BaseHTTPRequestHandler):
    """Denies everything, and repeats the credentials, as S3 and proxies do."""

    def do_GET(self) -> None:
        login = self.headers.get("Authorization", "")
        message = escape(f"{login} may not read {self.path}")
        body = f"<Error><Code>AccessDenied</Code><Message>{message}</Message></Error>"
        self._answer(403, body.encode())

    do_PUT = do_POST = do_GET

    def do_HEAD(self) -> None:
        self._answer(404, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def denying() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
