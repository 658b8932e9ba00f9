"""The provider that a worker of a model stage holds, and keeps warm."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vane_dagster.providers.embedding import EmbedTask
    from vane_dagster.providers.prompting import PromptTask

    ModelTask = PromptTask | EmbedTask


class ModelClient:
    """Holds a provider. Stages that use the same model and options share it."""

    def __init__(self, provider: Any, model: str, options: Mapping[str, Any]) -> None:
        self._provider = provider(model, **options)

    async def check_health(self) -> None:
        """Check the provider's health, if it has such a method."""
        probe = getattr(self._provider, "check_health", None)
        if probe is not None and asyncio.iscoroutine(answer := probe()):
            await answer

    async def __call__(self, batch: Any, *, model_task: ModelTask, workers: int = 1) -> Any:
        """Compute the output of a batch: a table, or for a prompt its `InTurns`."""
        if (shared_by := getattr(self._provider, "shared_by", None)) is not None:
            shared_by(workers)
        return await model_task.run(self._provider, batch)
