"""The provider "vllm" where a model can't be loaded; on two ranks; and without a chat template."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.results import failure
from support.tiny_answers import greedy
from support.vllm_stages import (
    TEXTS,
    answers,
    ask,
    docs,
    engine,
    gone,
    needs_vllm,
    shared_memory,
    until,
)
from vane_dagster.providers.sentence_transformers import SentenceTransformersProvider
from vane_dagster.providers.transformers import TransformersProvider
from vane_dagster.providers.vllm import VllmProvider

pytestmark = pytest.mark.usefixtures("vllm_variables")


class Below:
    """Notes the processes below this one, and the memory they share, while a run goes on."""

    def __init__(self) -> None:
        self.processes: set[psutil.Process] = set()
        self.shared: set[str] = set()
        self.others = set(psutil.Process().children(recursive=True))
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look)

    def look(self) -> None:
        while not self.over.wait(0.1):
            children = psutil.Process().children(recursive=True)
            for process in [child for child in children if child not in self.others]:
                self.processes.add(process)
                self.shared |= shared_memory(process.pid)

    def __enter__(self) -> Below:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()

    def end(self) -> None:
        """Waits until nothing of it is left."""
        assert self.processes
        assert gone([*self.processes])
        until(lambda: not any(os.path.exists(name) for name in self.shared), "memory is freed")


@pytest.mark.parametrize(
    "provider", [VllmProvider, TransformersProvider, SentenceTransformersProvider]
)
def test_a_folder_that_is_not_there_is_named(provider, tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(
        FileNotFoundError, match=f"model is '{missing}', and there is no '{missing}'"
    ):
        provider(missing)


@needs_vllm
def test_a_name_that_is_not_known(tmp_path, local, materialize):
    pipeline = docs(tmp_path)
    ask(pipeline, Path("no-such-organisation/no-such-model"))
    message = failure(materialize(pipeline, local, raises=False))
    assert message.startswith(
        "stage 'asked': VllmProvider('no-such-organisation/no-such-model') could not be constructed"
    )
    assert "outgoing traffic has been disabled" in message


def cut_weights(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


@needs_vllm
@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (cut_weights, "SafetensorError: Error while deserializing header"),
        (no_weights, "RuntimeError: Cannot find any model weights with"),
    ],
)
def test_a_model_that_the_engine_cannot_load_says_why(
    broken: Callable[[Path], None], why: str, tiny, tmp_path, local, materialize
):
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    broken(model)
    pipeline = docs(tmp_path)
    ask(pipeline, model)
    with Below() as below:
        message = failure(materialize(pipeline, local, raises=False))
    first = message.partition("\n\n")[0]
    assert first.startswith(f"stage 'asked': VllmProvider('{model}') could not be constructed")
    assert "EngineLoadError: vLLM's engine did not start: " in first
    assert why in first
    below.end()


@needs_vllm
def test_an_engine_that_is_killed_while_it_loads(tiny, tmp_path, local, materialize):
    pipeline = docs(tmp_path)
    ask(pipeline, tiny)
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.1):
            with contextlib.suppress(psutil.Error):  # one has ended meanwhile
                for process in engine(os.getpid()):
                    process.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with Below() as below:
        message = failure(materialize(pipeline, local, raises=False))
    over.set()
    killer.join()
    first = message.partition("\n\n")[0]
    assert first.startswith(f"stage 'asked': VllmProvider('{tiny}') could not be constructed")
    # The core says so where its rank was killed before it.
    logged_by_core = "vLLM's engine did not start: " in first
    assert logged_by_core or "None of its processes has logged an error; one that is" in first
    below.end()


@needs_vllm
def test_a_model_on_two_ranks(tiny, tmp_path, local, materialize, monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("each rank needs a core")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
    options: dict[str, Any] = {"tensor_parallel_size": 2}
    pipeline = docs(tmp_path)
    ask(pipeline, tiny, options=options)
    with Below() as below:
        materialize(pipeline, local)
    assert answers(tmp_path) == greedy(tiny, TEXTS)
    below.end()


@needs_vllm
def test_a_model_without_a_chat_template(tiny, tmp_path, local, materialize):
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    (model / "chat_template.jinja").unlink()
    system = "Be brief."
    pipeline = docs(tmp_path)
    ask(pipeline, model, system=system)
    materialize(pipeline, local)
    assert answers(tmp_path) == greedy(model, TEXTS, system=system)
    assert answers(tmp_path) != greedy(tiny, TEXTS, system=system)
