"""What a worker of a prompt or an embedding holds: a provider, which stays warm with it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa


class ModelTask(Protocol):
    """What is asked of a provider for a batch of rows; it goes with each call."""

    @property
    def method(self) -> str:
        """The provider's method that it needs."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that it reads."""

    @property
    def carried(self) -> tuple[str, ...]:
        """Those that it passes on."""

    @property
    def schema(self) -> pa.Schema:
        """What it adds to them."""

    @property
    def order(self) -> Any:
        """In which order rows are best asked about (`RowOrder`); None if that is all the same."""

    @property
    def sums(self) -> Mapping[str, Sequence[str]]:
        """Fields of struct columns that it adds, which are added up for each part."""

    @property
    def keyed(self) -> Mapping[str, Any]:
        """The values that change what comes out."""

    @property
    def classes(self) -> tuple[type, ...]:
        """The user's own classes that it needs in a worker."""

    def describe(self, model: str) -> str:
        """What is asked of a model, for people."""

    async def run(self, provider: Any, batch: pa.Table) -> Any:
        """What comes out for a batch, whose first column is the id."""


class ModelClient:
    """Holds a provider. Prompts and embeddings of one model share it.

    Args:
        provider: Its class.
        model: The model's name.
        options: For the provider.
    """

    def __init__(self, provider: Any, model: str, options: Mapping[str, Any]) -> None:
        self._provider = provider(model, **options)

    async def check_health(self) -> None:
        """Asks the provider, where it can be asked."""
        probe = getattr(self._provider, "check_health", None)
        if probe is not None and asyncio.iscoroutine(answer := probe()):
            await answer

    async def __call__(self, batch: pa.Table, *, model_task: ModelTask, workers: int = 1) -> Any:
        """Answers a batch, whose first column is the id; there are so many workers at most."""
        if (shared_by := getattr(self._provider, "shared_by", None)) is not None:
            shared_by(workers)
        return await model_task.run(self._provider, batch)
