"""Prompt stages over a few texts, and a provider for tests."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pydantic

import vane_dagster as vd
from support.arguments import grouped
from support.data import write_source
from vane_dagster.providers.base import Answer, Request

TEXTS = ["a fox", "a dog", "the fox and the dog", "nothing at all"]


class Reversed:
    OPERATIONAL = frozenset({"address"})

    def __init__(self, model: str, *, address: str = "", suffix: str = "") -> None:
        self.model, self.suffix = model, suffix

    async def submit(self, request: Request) -> Answer:
        text = request.messages[-1]["content"]
        if "poison" in text:
            raise ValueError("no answer to this")
        return Answer(text[::-1] + self.suffix, len(text), len(text))

    async def embed(self, texts: list[str], dimensions: int | None) -> list[list[float]]:
        return [[len(text), 0.0, 1.0, os.getpid()][: dimensions or 4] for text in texts]


def in_turns(batch: pa.Table) -> Any:
    """Return what a prompt gets for a batch: it calls a coroutine function with all rows."""
    return lambda call, turn: asyncio.gather(*map(call, batch.to_pylist()), return_exceptions=True)


class Person(pydantic.BaseModel):
    name: str
    age: int
    mood: Literal["good", "bad"] = "good"
    tags: list[str] = []

    @pydantic.field_validator("age")
    @classmethod
    def not_negative(cls, age: int) -> int:
        if age < 0:
            raise ValueError("nobody is that young")
        return age


def docs(tmp_path: Path, texts: list[str | None] = TEXTS, **columns: Any) -> vd.Pipeline:
    table = {"id": pa.array(range(len(texts)), pa.int64()), "text": pa.array(texts, pa.string())}
    write_source(tmp_path / "src", {**table, **columns})
    return vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")


def asked(
    above: Any, url: str, messages: Any = "{text}", name: str = "asked", **kwargs: Any
) -> vd.Stage:
    """Ask an endpoint, by its URL for OpenAI's API."""
    base = url.removesuffix("/v1") if kwargs.get("provider") == "anthropic" else url
    options = {"base_url": base, "api_key_env": "LLM_KEY", **kwargs.pop("options", {})}
    own = {"provider": "openai", "model": "m", "options": options, "env_vars": ["LLM_KEY"]}
    return above.prompt(name, messages, **grouped({**own, **kwargs}))
