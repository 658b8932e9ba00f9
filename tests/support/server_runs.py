"""Pipelines that ask a light server with OpenAI's API."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa

import vane_dagster as vd
from support.data import write_source
from support.paths import REPOSITORY

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the test modules

SERVER = REPOSITORY / "tests/support/misbehaving_server.py"
SCHEMA = {"id": "BIGINT", "answer": "VARCHAR", "server": "VARCHAR"}


def echo(name: str, *options: str, **given: Any) -> vd.Server:
    command = ["{python}", str(SERVER), "--port", "{port}", "--host", "{host}"]
    command += ["--key-env", "ECHO_KEY", *options]
    return vd.Server(command, name=name, api_key_env="ECHO_KEY", model="echo", **given)


def ask(batch: pa.Table, llm: Any) -> dict[str, list[Any]]:
    found = []
    for id in batch["id"].to_pylist():
        message = {"role": "user", "content": f"row {id}"}
        body = json.dumps({"model": llm.model, "messages": [message]}).encode()
        headers = {"Content-Type": "application/json", **llm.headers}
        request = urllib.request.Request(f"{llm.url}/v1/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            found.append(json.load(answer))
    return {
        "id": batch["id"].to_pylist(),
        "answer": [one["choices"][0]["message"]["content"] for one in found],
        "server": [one["system_fingerprint"] for one in found],
    }


def asking(folder: Path, server: vd.Server, rows: int = 20, **given: Any) -> vd.Pipeline:
    """Declare a pipeline with one stage, `answers`, that asks a server for each row."""
    write_source(folder, {"id": range(rows)})
    source = vd.parquet(str(folder))
    made = vd.Pipeline(given.pop("name", "asking"), source=source, id="id", **given)
    made.map_batches("answers", ask, fn_kwargs={"llm": server}, schema=SCHEMA)
    return made


def prompting(folder: Path, server: vd.Server, texts: list[str]) -> vd.Pipeline:
    """Declare a pipeline with one stage, `answers`, that sends texts to a server."""
    write_source(folder, {"id": range(len(texts)), "text": texts})
    source = vd.parquet(str(folder))
    made = vd.Pipeline("prompting", source=source, id="id", fragment_rows=10)
    made.prompt(
        "answers",
        "{text}",
        output_column="answer",
        concurrency=1,
        on_error=vd.Failures("quarantine", max_error_rate=0.5),
        model=server,
    )
    return made
