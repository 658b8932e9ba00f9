"""Embeddings by vLLM in the worker itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from vane_dagster.errors import RowErrors, StageError
from vane_dagster.providers.vllm_engine import VllmEngine


class VllmEmbedder(VllmEngine):
    """Embeds with vLLM's asynchronous engine; each text is a separate request.

    A vector is the output of the model's pooling. vLLM reads the pooling from the model's files,
    including those of Sentence Transformers, or from ``engine_kwargs={"pooler_config": ...}``. For
    a language model it is the hidden state of the last token. An engine that embeds is separate
    from the engine of a prompt with the same model.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        tensor_parallel_size: int | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        pools = {"runner": "pooling", "convert": "embed", **(engine_kwargs or {})}
        super().__init__(model, revision, tensor_parallel_size, pools)

    async def embed(self, texts: Sequence[str], dimensions: int | None) -> Any:
        """Embed texts; see `Embedder.embed`."""
        params = self._params(dimensions)
        asked = (self._one(text, params) for text in texts)
        results = await asyncio.gather(*asked, return_exceptions=True)
        errors = {i: one for i, one in enumerate(results) if isinstance(one, BaseException)}
        vectors = [one for one in results if not isinstance(one, BaseException)]
        if errors:
            raise RowErrors(errors, vectors)
        return vectors

    async def _one(self, text: str, params: Any) -> Any:
        prompt = await self._tokens(text)
        steps = self._engine.encode(prompt, params, str(next(self._numbers)))
        *_, response = [step async for step in steps]  # one
        return response.outputs.data.float().numpy()

    def _params(self, dimensions: int | None) -> Any:
        from vllm.pooling_params import PoolingParams

        # The stage normalizes the vectors itself, if configured.
        params = PoolingParams(task="embed", dimensions=dimensions, use_activation=False)
        try:
            params.verify(self._engine.model_config)
        except Exception as error:  # vLLM's own error
            raise StageError(
                f"dimensions={dimensions} is refused by vLLM: {error} For a model that is known to "
                "allow it: engine_kwargs={'hf_overrides': {'is_matryoshka': True}}"
            ) from error
        return params
