"""Environment variables of workers whose Ray head was started in another environment."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.heads import Cluster, head
from support.own_heads import DOUBLED, SMALL, outs, source  # noqa: F401  # fixture
from support.pools_process import Process

MODELS = """
import os

MODE = os.environ["VT_MODE"]

class Model:
    def __init__(self, log):
        self.factor = {"old": 1, "new": 2}[MODE]

    def __call__(self, batch):
        ids = batch["id"].to_pylist()
        return {"id": ids, "out": [self.factor * n for n in ids], "pid": ids}

class Unset:
    def __init__(self, log):
        pass

    def __call__(self, batch):
        return {"id": batch["id"], "out": batch["id"], "pid": [os.environ["VT_UNSET"]]}
"""


@pytest.fixture(scope="module")
def old_head() -> Iterator[Cluster]:
    """A head that was started with another value of a variable, and without a second one."""
    folder = Path(tempfile.mkdtemp(prefix="vr-", dir="/tmp"))
    try:
        with head(folder, *SMALL, VT_MODE="old") as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(
    folder: Path, key: str, stage: dict[str, Any], more_code: str = "", **where: Any
) -> Process:
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models" / "models.py").write_text(MODELS + more_code)
    return Process(folder, {"out": stage}, key, **where)


def test_a_variable_of_the_head_that_differs_is_named(source, old_head, monkeypatch):
    monkeypatch.setenv("VT_MODE", "new")
    where = {"address": old_head.address}
    differs = "stage 'docs/out': its code names 'VT_MODE'; environment variables of these names"

    unsent = run(source, "a", {}, **where)
    unsent.done()
    (line,) = [line for line in unsent.output.splitlines() if differs in line]
    assert "WARNING" in line
    assert "vd.Workers(env_vars=['VT_MODE']), or keyed_env_vars" in line
    assert outs(source, "a")["out"].to_pylist() == list(range(40))

    sent = run(source, "b", {"keyed_env_vars": ["VT_MODE"]}, **where)
    sent.done()
    assert differs not in sent.output
    assert outs(source, "b")["out"].to_pylist() == DOUBLED


def test_a_variable_that_the_head_lacks_fails_with_the_fix(source, old_head, monkeypatch):
    """Also if it is read on import, by a line that is no code of the stage."""
    monkeypatch.setenv("VT_MODE", "old")
    monkeypatch.setenv("VT_UNSET", "1")
    cases = {"Unset": "", "Model": 'UNREAD = os.environ["VT_UNSET"]'}
    for model, more_code in cases.items():
        text = run(source, "a", {"model": model}, more_code, address=old_head.address).failed()
        assert ("its code names 'VT_UNSET'" in text) == (model == "Unset")
        assert "'VT_UNSET'. The environment variable is not set in the worker. Set it" in text
        assert "name it in vd.Workers(env_vars=...) or keyed_env_vars" in text


def test_subprocesses_have_the_environment_of_the_run(source, monkeypatch):
    monkeypatch.setenv("VT_MODE", "new")
    local = run(source, "a", {}, local=True)
    local.done()
    assert "its code names" not in local.output
    assert outs(source, "a")["out"].to_pylist() == DOUBLED
