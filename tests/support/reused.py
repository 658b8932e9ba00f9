"""Functions whose calls are noted in the file that the environment names."""

from __future__ import annotations

import os

import pyarrow as pa

import vane_dagster as vd


def noted(stage: str, text: str) -> str:
    with open(os.environ["NOTES"], "a+") as notes:
        notes.seek(0)
        is_first = f"{stage}={text}\n" not in notes.read()
        notes.write(f"{stage}={text}\n")
    if text == "bad":
        raise ValueError("bad")
    if text == "lost" or (text == "lost once" and is_first):
        raise ConnectionError("lost")
    return text


def upper(text: str, suffix: str = "") -> str:
    return noted("upper", text).upper() + suffix


def content(file: vd.File) -> str:
    return noted("content", file.read().decode())


def contents(batch: pa.Table) -> dict[str, list[str]]:
    read = [vd.File(path).read().decode() for path in batch["path"].to_pylist()]
    return {"contents": [noted("contents", each) for each in read]}


def with_twin(path: str, twin: str) -> str:
    return noted("with_twin", vd.File(twin).read().decode())
