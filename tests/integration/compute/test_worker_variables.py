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
"""


@pytest.fixture(scope="module")
def old_head() -> Iterator[Cluster]:
    """A head that was started with another value of a variable."""
    folder = Path(tempfile.mkdtemp(prefix="vr-", dir="/tmp"))
    try:
        with head(folder, *SMALL, VT_MODE="old") as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(folder: Path, key: str, stage: dict[str, Any], **where: Any) -> Process:
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models" / "models.py").write_text(MODELS)
    return Process(folder, {"out": stage}, key, **where)


def test_a_variable_that_is_sent_replaces_that_of_the_head(source, old_head, monkeypatch):
    monkeypatch.setenv("VT_MODE", "new")
    for key, stage, expected in (
        ("a", {}, list(range(40))),
        ("b", {"keyed_env_vars": ["VT_MODE"]}, DOUBLED),
    ):
        run(source, key, stage, address=old_head.address).done()
        assert outs(source, key)["out"].to_pylist() == expected
