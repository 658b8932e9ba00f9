"""An async class that calls an HTTP API, with many rows in flight in one worker.

To use Dagster's UI, first start the demo's API: python examples/async_api.py serve
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "translate").absolute()
WORDS = {"good": "gut", "morning": "Morgen", "night": "Nacht", "evening": "Abend"}
os.environ.setdefault("TRANSLATE_URL", "http://127.0.0.1:8642")


class Translator:
    """Holds one HTTP session for all calls."""

    session: Any = None

    async def __call__(self, batch: pa.Table) -> dict[str, Any]:
        import aiohttp

        self.session = self.session or aiohttp.ClientSession()
        answers = (self.ask(text) for text in batch["text"].to_pylist())
        return {"german": await asyncio.gather(*answers)}

    async def ask(self, text: str) -> str:
        url = os.environ["TRANSLATE_URL"]  # read in each call: a later run may bring another
        async with self.session.post(url, json={"q": text}, raise_for_status=True) as response:
            return await response.text()


@dg.asset
def greetings() -> None:
    """The input: 400 texts, for answers of 0.1 s each."""
    (ROOT / "texts").mkdir(parents=True, exist_ok=True)
    lines = [f"good {[*WORDS][1 + i % 3]} {i}" for i in range(400)]
    pq.write_table(pa.table({"id": range(400), "text": lines}), ROOT / "texts" / "all.parquet")


texts = vd.Pipeline("texts", source=vd.parquet(str(ROOT / "texts"), asset=greetings), id="id")
texts.map_batches(
    "german",
    Translator,
    schema={"german": "VARCHAR"},
    batch_size=8,
    # 8 batches in flight are 64 requests. Variables, such as API keys, are never stored or logged.
    concurrency=vd.Workers(max_concurrency=8, env_vars=["TRANSLATE_URL"]),
).write("published", str(ROOT / "out"))

assets = [greetings, texts.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


class DemoApi(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(0.1)  # as slow as a remote API
        answer = " ".join(WORDS.get(word, word) for word in asked["q"].split()).encode()
        self.send_response_only(200)
        self.end_headers()
        self.wfile.write(answer)


def main() -> None:
    serve = "serve" in sys.argv
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("127.0.0.1", 8642 if serve else 0), DemoApi)
    if serve:
        server.serve_forever()
    os.environ["TRANSLATE_URL"] = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("texts_pipeline"):
        seconds = done.metadata["seconds"].value
        count = done.metadata["rows_computed"].value
        print(done.asset_key.path[-1], "computed:", count, "in", seconds, "s")
    for row in pq.read_table(ROOT / "out").slice(0, 3).to_pylist():
        print(row)


if __name__ == "__main__":
    main()
