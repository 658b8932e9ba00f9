"""Misspelled arguments of vLLM, where it is installed."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support.prompts import docs
from vane_dagster.providers import vllm_arguments
from vane_dagster.providers.vllm_arguments import misspelled

FILES = {
    "__init__.py": "raise ImportError('it takes seconds')",
    "engine/arg_utils.py": """
class EngineArgs:
    max_model_len: int = 0
    dtype: str = "auto"
""",
    "entrypoints/new/cli_args.py": """
class FrontendArgs:
    chat_template: str | None = None


def make_arg_parser(parser):
    parser.add_argument("--brand-new", "-bn")
""",
}


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No vLLM where pipelines are declared."""
    monkeypatch.setattr(vllm_arguments, "find_spec", lambda name: None)
    vllm_arguments._installed.cache_clear()
    yield
    vllm_arguments._installed.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A vLLM with three arguments and one flag, which cannot be imported."""
    for name, text in FILES.items():
        file = tmp_path / "site" / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    vllm_arguments._installed.cache_clear()
    yield
    vllm_arguments._installed.cache_clear()


@pytest.mark.usefixtures("installed")
def test_the_installed_vllm_decides():
    for name in ("max_model_len", "dtype", "chat_template", "brand_new"):
        assert misspelled(name) is None, name
    assert misspelled("max_model_lenn") == (
        "The vLLM that is installed here does not have it. Did you mean 'max_model_len'?"
    )
    assert misspelled("tensor_parallel_size") == "The vLLM that is installed here does not have it."


@pytest.mark.usefixtures("absent")
def test_without_vllm_the_worker_decides():
    assert misspelled("max_model_lenn") is None


@pytest.mark.usefixtures("installed")
def test_a_worker_refuses_nothing(monkeypatch):
    """It imports declarations too, and may have another vLLM."""
    monkeypatch.setattr(vllm_arguments, "is_worker", lambda: True)
    assert misspelled("max_model_lenn") is None


@pytest.mark.usefixtures("installed")
def test_servers_and_providers_refuse_what_is_misspelled(tmp_path):
    given: dict[str, Any] = {
        "provider": "vllm",
        "model": vd.Model("m", options={"engine_kwargs": {"max_model_lenn": 8}}),
    }
    refused = {
        "vd.VLLMServer: 'max_model_lenn' is no flag": lambda: vd.VLLMServer(
            "m", {"max_model_lenn": 8}
        ),
        "'docs/asked': engine_kwargs has 'max_model_lenn'": (
            lambda: docs(tmp_path).prompt("asked", "{text}", **given)
        ),
        "'docs/vectors': engine_kwargs has 'max_model_lenn'": (
            lambda: docs(tmp_path).embed("vectors", "text", **given)
        ),
    }
    for message, declare in refused.items():
        with pytest.raises(vd.DefinitionError, match=f"{re.escape(message)}.*Did you mean"):
            declare()
    vd.VLLMServer("m", {"max_model_lenn": 8}, python="/other/bin/python")  # another vLLM decides
