"""A user's modules for tests of code identity."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.edits import Project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    root = tmp_path / "project"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = Project(root)
    yield made
    made.forget()


DEFS = '''
"""The definitions."""
import functools
import numpy as np
import unrelated
from typing import TYPE_CHECKING
from helpers import normalise

if TYPE_CHECKING:
    import never_there

LIMIT = 10
WORDS = {}
WORDS["a"] = 1
OTHER = 5

if LIMIT > 3:
    MODE = "long"
else:
    MODE = "short"

try:
    import orjson_missing as fast
except ImportError:
    fast = None

def logged(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)
    return inner

def inner_helper(text):
    # cut it
    return text[:LIMIT]

@logged
def udf(batch, size=OTHER):
    """Does it."""
    features = inner_helper(batch)
    return normalise(features), WORDS, MODE, fast

class Base:
    factor = 2

class Model(Base):
    """A model."""

    def __init__(self):
        import lazy_helper
        self.run = lazy_helper.run

    def __call__(self, batch):
        return np.asarray(batch) * self.factor

def other(batch):
    return unrelated.work(batch) + unrelated.LATER

features = other
'''
HELPERS = "def normalise(text):\n    return text.strip()\n\ndef unused():\n    return 1\n"


@pytest.fixture
def defs(project: Project) -> Project:
    project.write(
        defs=DEFS,
        helpers=HELPERS,
        lazy_helper="from deeper import run\n",
        deeper="def run(x):\n    return x\n",
        unrelated="LATER = 1\ndef work(batch):\n    return batch\n",
    )
    return project
