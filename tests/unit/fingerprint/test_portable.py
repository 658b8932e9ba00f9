"""Which functions travel with each call, and which need their modules in the worker."""

from __future__ import annotations

import pickle
import sys

import pytest

from support.code_project import project  # noqa: F401  # a fixture
from support.edits import Project
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.portable import portable_payload

HELPERS = """
import functools
import re
import threading
from collections import namedtuple

import other

LIMIT = 3
WORD = re.compile(r"\\w+")
LOCK = threading.Lock()
Pair = namedtuple("Pair", "a b")


class Shorter:
    def __init__(self, limit):
        self.limit = limit

    def cut(self, text):
        return text[: self.limit]


def shortened(text):
    return Shorter(LIMIT).cut(text)


@functools.lru_cache
def remembered(text):
    return text


class Sentinel:
    def __reduce__(self):
        return "SENTINEL"


SENTINEL = Sentinel()
LARGE = b"x" * 300_000
"""
HEAD = """
import math
import sys
import importlib

import other
from helpers import *


def udf(row):
    """
RELATIVE = """
def udf(row):
    from . import other

    return other
"""
PORTABLE = {
    "alone": "return row['text'].upper()",
    "a library": "return math.sqrt(len(row['text']))",
    "names of another module": "return shortened(row['text']), Pair(1, 2), WORD.findall('a')",
    "another module": "return other.tail(row['text'])",
    "a cache": "return remembered(row['text']), remembered.cache_info()",
}
BOUND = {
    "a module of the user's, imported in the call": "import other; return other.tail('a')",
    "by a function of importlib": "return importlib.import_module('other').tail('a')",
    "one that is looked up": "return sys.modules['other'].tail('a')",
    "an object that is pickled by its name": "return SENTINEL is not None",
    "what cannot be pickled": "return LOCK.locked()",
    "much data": "return len(LARGE)",
}


def payload(project: Project, body: str) -> bytes | None:
    project.write(
        defs=HEAD.replace("import *", "import (LARGE, LOCK, SENTINEL, WORD, Pair, remembered, "
                          "shortened)") + body + "\n",
        helpers=HELPERS,
        other="def tail(text):\n    return text[-1:]\n",
    )  # fmt: skip
    udf = project.load("udf")
    return portable_payload(code_identity(udf).modules, udf)


@pytest.mark.parametrize("body", PORTABLE.values(), ids=PORTABLE)
def test_a_portable_function_runs_where_its_modules_are_not(body, project, monkeypatch):
    found = payload(project, body)
    assert found is not None
    project.forget()
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(project.root)])
    pickle.loads(found)({"text": "abcdef"})
    assert not {"defs", "helpers", "other"} & set(sys.modules)


@pytest.mark.parametrize("body", BOUND.values(), ids=BOUND)
def test_a_function_that_may_need_its_modules_is_not_portable(body, project):
    assert payload(project, body) is None


def test_a_relative_import_in_a_call_is_one_of_the_users_modules(project):
    (project.root / "portable_pkg").mkdir()
    for name, text in {"__init__": "", "other": "", "defs": RELATIVE}.items():
        (project.root / "portable_pkg" / f"{name}.py").write_text(text)
    udf = project.load("udf", "portable_pkg.defs")
    assert portable_payload(code_identity(udf).modules, udf) is None
