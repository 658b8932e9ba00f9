"""Edits of classes and functions under our decorators: of the decorators, of one method, of all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.edits import Project
from vane_dagster.fingerprint.code import worker_code_digest

PLAIN = '''
import functools
import numpy as np

SIZE = 3
FACTOR = 2


def load(path, size):
    return np.ones(size)


class Base:
    def __init__(self, depth=1):
        self.depth = depth


class Model(Base):
    """A model."""

    def __init__(self, path, size=SIZE):
        super().__init__(size)
        self.weights = load(path, size)

    def _scaled(self, x):
        return FACTOR * x

    def transcribe(self, text: str) -> str:
        return self._scaled(text) + str(self.weights.sum())

    def embed(self, text):
        return [float(self.depth), len(text)]


def udf(text: str) -> int:
    return FACTOR * len(text)
'''
HEAD = "import vane_dagster as vd\nGPUS = 1\n"
DECORATED = HEAD + PLAIN.replace(
    "class Model", "@vd.cls(gpus=GPUS, max_concurrency=2)\nclass Model"
).replace(
    "    def transcribe", '    @vd.method(return_dtype="VARCHAR")\n    def transcribe'
).replace("    def embed", '    @vd.method.batch(return_dtype="FLOAT[2]")\n    def embed').replace(
    "def udf", "@vd.func(max_retries=2)\ndef udf"
)
OTHER_IMPORTS = {
    "import vane_dagster as vd": "@vd.",
    "from vane_dagster import cls, func, method": "@",
    "import vane_dagster": "@vane_dagster.",
}
EDITS_OF_DECORATORS = [
    ("GPUS = 1", "GPUS = 2"),
    ("@vd.cls(gpus=GPUS, max_concurrency=2)", "@vd.cls"),
    ('"FLOAT[2]")', '"FLOAT[2]", batch_size=8)'),
    ("@vd.func(max_retries=2)\n", ""),
    ('return_dtype="VARCHAR"', "return_dtype=TYPE"),
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Project(tmp_path)
    yield made
    made.forget()


def pool(project: Project) -> str:
    return worker_code_digest(project.load("Model"))


def identities(project: Project) -> tuple[object, ...]:
    return project.digest("Model"), project.digest("udf"), pool(project)


@pytest.mark.parametrize("head", OTHER_IMPORTS)
def test_decorators_change_no_identity(head, project):
    project.write(defs=PLAIN)
    plain = identities(project)
    text = DECORATED.replace("import vane_dagster as vd", head)
    project.write(defs=text.replace("@vd.", OTHER_IMPORTS[head]))
    assert identities(project) == plain


@pytest.mark.parametrize(("old", "new"), EDITS_OF_DECORATORS)
def test_an_edit_of_a_decorator_keeps_results_and_workers(old, new, project):
    project.write(defs="TYPE = 'VARCHAR'\n" + DECORATED)
    before = identities(project)
    project.edit("defs.py", old, new)
    assert identities(project) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return self._scaled", "self.weights.fuse()\n        return self._scaled"),
        ("return [float", "return [1 + float"),
        ("FACTOR = 2", "FACTOR = 3"),
        ("depth=1", "depth=2"),
        ("np.ones", "np.zeros"),
    ],
)
def test_an_edit_of_the_code_of_a_class_loads_its_model_again(old, new, project):
    project.write(defs=DECORATED)
    before = pool(project)
    project.edit("defs.py", old, new)
    assert pool(project) != before
    project.edit("defs.py", new, old)
    assert pool(project) == before


# Declarations in the module of the class

DECLARED = (
    "import os\n"
    + DECORATED.replace("self.weights =", "os.environ['MODEL'] = path\n        self.weights =")
    + "\nMODEL = Model('m')\ndocs = vd.Pipeline('docs', source=vd.parquet('/nowhere'), id='id')\n"
    + "docs.map('a', Model('m').transcribe)\ndocs.map('b', MODEL.transcribe)\n"
)


def test_a_declaration_runs_nothing_of_the_class(project):
    project.write(defs=DECLARED)
    before, function = pool(project), project.digest("udf")
    project.edit("defs.py", "os.environ['MODEL'] = path", "os.environ['MODEL'] = path + '1'")
    assert pool(project) != before
    assert project.digest("udf") == function
