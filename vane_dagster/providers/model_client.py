"""The provider that a worker of a model stage holds, and keeps warm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pyarrow as pa


class ModelTask(Protocol):
    """The request to a provider for a batch of rows; it is passed to each call."""

    @property
    def method(self) -> str:
        """The provider's method that it calls."""

    @property
    def reads(self) -> tuple[str, ...] | None:
        """The columns that it reads; None for all."""

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that its input must have."""

    @property
    def schema(self) -> pa.Schema:
        """The columns that it adds."""

    @property
    def declared_sampling(self) -> Mapping[str, Any]:
        """Its sampling parameters, with None for those that are read from each row."""

    @property
    def order(self) -> Any:
        """The preferred order of rows (`RowOrder`); None if the order does not matter."""

    @property
    def usage(self) -> str | None:
        """The column with the usage of its answers, which is summed for each part."""

    def keyed(self, include: Any) -> Mapping[str, Any]:
        """Return the values that change the output, in a frozen order."""

    @property
    def classes(self) -> tuple[type, ...]:
        """The user's own classes that it needs in a worker."""

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The user's functions that it calls in a worker. They count in keys."""

    @property
    def preloaded(self) -> tuple[Callable[..., Any], ...]:
        """Those of `functions` that run only in a worker which was started with their modules.

        The others travel with each call, so a worker runs each edit of them.
        """

    def describe(self, model: str) -> str:
        """Describe the request to a model, for users."""

    async def run(self, provider: Any, batch: pa.Table) -> Any:
        """Compute the output columns of a batch, in the order of its rows."""


class ModelClient:
    """Holds a provider. Stages that use the same model and options share it."""

    def __init__(self, provider: Any, model: str, options: Mapping[str, Any]) -> None:
        self._provider = provider(model, **options)

    async def check_health(self) -> None:
        """Check the provider's health, if it has such a method."""
        probe = getattr(self._provider, "check_health", None)
        if probe is not None and asyncio.iscoroutine(answer := probe()):
            await answer

    async def __call__(self, batch: pa.Table, *, model_task: ModelTask, workers: int = 1) -> Any:
        """Compute the output of a batch."""
        if (shared_by := getattr(self._provider, "shared_by", None)) is not None:
            shared_by(workers)
        return await model_task.run(self._provider, batch)
