"""Edits of models and functions: which of them keep what a worker has constructed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.edits import Project
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.constructor import ConstructorIdentity, constructor_identity

MODEL = '''
import json
import os

import numpy as np

import after
import before

SIZE = 3
FACTOR = 2
STOP = ("a", "b")
TABLE = {"x": 1}


def load(size):
    """Makes weights."""
    return np.ones(size)


def scale(rows):
    return [FACTOR * row for row in rows]


def note(path, text):
    with open(path, "a") as opened:
        opened.write(text)


class Net:
    def __init__(self, size):
        self.layers = [size]

    def forward(self, x):
        return x + len(self.layers)


class Base:
    KIND = "base"

    def __init__(self, depth=1):
        self.depth = self.at_least(depth)

    def at_least(self, depth):
        return max(1, depth)

    def described(self):
        return "base"


class Model(Base):
    """A model."""

    WIDTH = 4
    SHOWN = 5

    def __init__(self, path="", size=SIZE):
        super().__init__(size)
        self.path = path
        self.width = self.WIDTH
        self.weights = load(size)
        self.more = before.weights(self._prepared(size))
        self.net = Net(size)
        note(path or os.devnull, "loaded")

    def _prepared(self, size):
        return size + 1

    def post(self, rows):
        out = [row for row in rows if row not in STOP]
        out.append(self.SHOWN)
        return out

    def __call__(self, batch):
        note(self.path or os.devnull, "called")
        rows = scale(batch["id"].to_pylist())
        found = {"id": self.post(rows)}
        found["out"] = [self.net.forward(float(self.weights.sum()))] * len(rows)
        found["kind"] = [TABLE["x"] + after.finish(self.described())] * len(rows)
        return found


class Other:
    pass
'''
FILES = {
    "defs": MODEL,
    "before": "def weights(size):\n    return [0.5] * size\n",
    "after": "def finish(text):\n    return len(text)\n\ndef unused():\n    pass\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Project(tmp_path)
    yield made
    made.forget()


def identity(project: Project, *arguments: Any, **options: Any) -> ConstructorIdentity:
    return constructor_identity(project.load("Model"), arguments, **options)


# Edits of the call alone

CALLS = {
    "__call__": ("defs.py", 'found["out"] =', 'found["out"] = [0] + '),
    "a method": ("defs.py", "out.append(self.SHOWN)", "out.append(-self.SHOWN)"),
    "a base's method": ("defs.py", 'return "base"', 'return "a base"'),
    "a helper": ("defs.py", "FACTOR * row for", "-FACTOR * row for"),
    "a constant of a helper": ("defs.py", "FACTOR = 2", "FACTOR = 3"),
    "a constant of a method": ("defs.py", 'STOP = ("a"', 'STOP = ("c"'),
    "a table that only calls read": ("defs.py", '"x": 1', '"x": 2'),
    "a class attribute": ("defs.py", "SHOWN = 5", "SHOWN = 6"),
    "a module of calls": ("after.py", "len(text)", "2 * len(text)"),
    "a method that is added": ("defs.py", "    def post(", "    def x(self):\n        return 1\n\n"
                               "    def post("),
    "what is imported for calls": ("defs.py", "return found", "import math\n        return found"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_an_edit_that_only_calls_reach_keeps_what_is_constructed(name, project):
    project.write(**FILES)
    before, code = identity(project), project.digest("Model")
    assert before.shares_state, before.reason
    project.edit(*CALLS[name])
    after = identity(project)
    assert after.shares_state, after.reason
    assert after.digest == before.digest
    assert project.digest("Model") != code or "added" in name or "imported" in name


@pytest.mark.parametrize(("old", "new"), [("class Other:", "class Others:"), ("import json", "")])
def test_an_edit_of_something_else_keeps_both(old, new, project):
    project.write(**FILES)
    before, code = identity(project), project.digest("Model")
    project.edit("defs.py", old, new)
    assert (identity(project), project.digest("Model")) == (before, code)


# Edits of what is constructed

CONSTRUCTED = {
    "__init__": ("defs.py", "self.path = path", "self.path = path or 'x'"),
    "a base's __init__": ("defs.py", "self.depth = self", "self.depth = -self"),
    "a base's method that it calls": ("defs.py", "max(1, depth)", "max(2, depth)"),
    "a method that it calls": ("defs.py", "return size + 1", "return size + 2"),
    "a class attribute that it reads": ("defs.py", "WIDTH = 4", "WIDTH = 6"),
    "a helper": ("defs.py", "np.ones(size)", "np.zeros(size)"),
    "a default": ("defs.py", "SIZE = 3", "SIZE = 4"),
    "a default's text": ("defs.py", "size=SIZE", "size=SIZE + 1"),
    "a module of it": ("before.py", "0.5", "0.6"),
    "a class in the state": ("defs.py", "return x + len", "return x - len"),
    "the base": ("defs.py", "class Model(Base)", "class Model(Net)"),
    "what both call": ("defs.py", "opened.write(text)", "opened.write(text + '!')"),
    "a class attribute that is now read": ("defs.py", "self.width = self.WIDTH",
                                           "self.width = self.SHOWN"),
    "a property in place of an attribute": ("defs.py", "    def post(", "    @property\n    def "
                                            "net(self):\n        return 1\n\n    def post("),
    "the environment": ("defs.py", "SIZE = 3", "SIZE = 3\nos.environ['HF'] = '1'"),
    "a library's settings": ("after.py", "def unused", "import torch\ntorch.set_num_threads(1)\n"
                             "def unused"),
    "a name that leads elsewhere": ("defs.py", "import before", "import after as before"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_an_edit_that_construction_reaches_makes_a_new_pool(name, project):
    project.write(**FILES)
    before = identity(project)
    assert before.shares_state, before.reason
    project.edit(*CONSTRUCTED[name])
    assert identity(project).digest != before.digest


def test_settings_of_a_module_that_is_only_imported_count(project):
    project.write(**FILES, third="import os\nos.environ['X'] = '1'\n")
    project.edit("after.py", "def unused", "import third\ndef unused")
    before = identity(project)
    assert before.shares_state, before.reason
    project.edit("third.py", "'1'", "'2'")
    assert identity(project).digest != before.digest


# Undecidable cases

CLASS = """
import collections
import functools
import random
import threading
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import cfg

COUNT = 0
SEEN = {{}}
{top}

def prep(x):
    return x + 1

class Row:
    def __init__(self, x):
        self.x = x

class Mode(Enum):
    FAST = 1

{decorator}
class Model{bases}:
    {body}

    def __init__(self, path=""):
        self.x = 1
        {init}

    def __call__(self, batch):
        {call}
        return batch

    {more}
"""
STATE = "self.items = [1]\n        self.model = np.zeros(3)"
UNSAFE: dict[str, dict[str, str]] = {
    "slots": {"body": "__slots__ = ('x',)"},
    "a metaclass": {"top": "class Meta(type):\n    pass", "bases": "(metaclass=Meta)"},
    "a library's base": {"bases": "(threading.Thread)"},
    "a builtin base": {"bases": "(dict)"},
    "a decorator": {"top": "def mark(kind):\n    return kind", "decorator": "@mark"},
    "__getattr__": {"more": "def __getattr__(self, name):\n        return 1"},
    "__setattr__": {"more": "def __setattr__(self, name, value):\n        pass"},
    "__del__": {"more": "def __del__(self):\n        pass"},
    "__new__": {"more": "def __new__(cls, path=''):\n        return object.__new__(cls)"},
    "__init_subclass__": {"more": "def __init_subclass__(cls):\n        pass"},
    "a mutable class attribute": {"body": "cache = {}"},
    "a statement in its body": {"body": "for n in range(2):\n        pass"},
    "a descriptor": {"body": "prepared = functools.partialmethod(prep)"},
    # Construction passes the object, or parts of it, on
    "construction passes itself": {"init": "prep(self)"},
    "construction keeps a method": {"init": "self.hook = self.__call__"},
    "construction registers a method": {"init": "np.register(self.post)",
                                        "more": "def post(self):\n        pass"},
    "construction reads its own dict": {"init": "self.__dict__.update(a=1)"},
    "construction sets by name": {"init": "setattr(self, path, 1)"},
    "construction looks at its class": {"init": "self.y = type(self).__name__"},
    "construction names its class": {"init": "Model.made = 1"},
    "construction runs a thread of itself": {"init": "threading.Thread(target=self.run).start()",
                                             "more": "def run(self):\n        pass"},
    "construction calls itself": {"init": "self({})"},
    "construction uses an old super": {"init": "super(Model, self).__init__()"},
    # State outside of the object
    "a cache that both use": {"init": "SEEN['a'] = 1", "call": "SEEN.get('a')"},
    "a table that both read": {"init": "self.n = SEEN", "call": "n = SEEN.get('a')"},
    "a counter": {"init": "global COUNT\n        COUNT += 1"},
    "a module that is written to": {"init": "cfg.X = 2"},
    "a module's state that both use": {"init": "self.c = cfg.STATE", "call": "c = cfg.STATE"},
    "a module as an argument": {"init": "prep(cfg)"},
    "a class of which both make instances": {"init": "self.r = Row(1)", "call": "r = Row(2)"},
    "a class that calls check": {"init": "self.r = Row(1)",
                                 "call": "ok = isinstance(self.r, Row)"},
    "an enum that both use": {"init": "self.m = Mode.FAST", "call": "ok = self.m is Mode.FAST"},
    "a cache that both call": {"top": "@functools.lru_cache\ndef made(x):\n    return [x]",
                               "init": "self.n = made(1)", "call": "n = made(1)"},
    # Calls that leave something behind
    "a counter of calls": {"call": "self.n = 1"},
    "an attribute that is deleted": {"call": "del self.x"},
    "a memo": {"init": STATE, "call": "self.items[0] = 2"},
    "a list that grows": {"init": STATE, "call": "self.items.append(2)"},
    "a list that grows by another name": {"init": STATE, "call": "i = self.items; i.append(2)"},
    "a list that grows in place": {"init": STATE, "call": "i = self.items; i += [2]"},
    "a list that grows through a method": {"init": STATE, "call": "i = self.get(); i.append(2)",
                                           "more": "def get(self):\n        return self.items"},
    "a list in a list": {"init": "self.rows = [[1]]",
                         "call": "out = [row for row in self.rows]; out[0].append(1)"},
    "a list that grows in a helper": {
        "top": "def grow(items):\n    items.append(1)", "init": STATE, "call": "grow(self.items)"},
    "a list that grows in a loop": {"init": "self.rows = [[1]]",
                                    "call": "for row in self.rows: row.append(1)"},
    "a list that grows in a lambda": {
        "init": STATE, "call": "n = list(map(lambda m: m.append(1), [self.items]))"},
    "an array in place": {"init": STATE, "call": "m = np.asarray(self.model); m[0] = 1"},
    "a list that grows by its class": {"init": STATE, "call": "list.append(self.items, 1)"},
    "an attribute by another class": {"call": "object.__setattr__(self, 'y', 1)"},
    "a heap": {"top": "import heapq", "init": STATE, "call": "n = heapq.heappop(self.items)"},
    "an array as an output": {"init": STATE, "call": "n = np.add(1, 2, out=self.model)"},
    "a frame in place": {"init": STATE, "call": "n = self.model.fillna(0, inplace=True)"},
    "a model that is converted": {"init": STATE, "call": "m = self.model.half()"},
    "a model that is called for its effect": {"init": STATE, "call": "self.model.warm()"},
    "a setter": {"init": STATE, "call": "ok = self.model.set_adapter('x')"},
    "a method with an underscore": {"init": STATE, "call": "m = self.model.mul_(2)"},
    "an iterator": {"init": "self.ids = iter([1])", "call": "n = next(self.ids)"},
    "a cached property": {"more": "@functools.cached_property\n    def y(self):\n        return 1"},
    "a cached helper": {"top": "@functools.cache\ndef made(x):\n    return x",
                        "call": "n = made(1)"},
    "a method that sets": {"more": "def set(self):\n        self.y = 1", "call": "self.set()"},
    "a method that construction calls too": {
        "more": "def fill(self):\n        self.y = 1", "init": "self.fill()",
        "call": "self.fill()"},
    "a global": {"call": "global COUNT; COUNT = 2"},
    "a module-level table": {"call": "SEEN['a'] = 2"},
    "a module": {"call": "cfg.X = 2"},
    "a class": {"call": "type(self).n = 2"},
    "its class": {"call": "Model.n = 2"},
    "a library's random state": {"call": "random.seed(1)"},
    "a library's settings": {"call": "np.set_printoptions(precision=2)"},
    "a library's attribute": {"call": "np.kept = 1"},
    "a library's settings that are used": {"call": "old = np.setdefaults(1)"},
    "an attribute by name": {"call": "setattr(self, 'y', 1)"},
    "a thread": {"call": "t = threading.Thread(target=prep)"},
    "a helper that counts": {"top": "def tell(x):\n    global COUNT\n    COUNT += x",
                             "call": "tell(1)"},
    # What construction keeps
    "an object in the state that counts": {
        "top": "class Stats:\n    def __init__(self):\n        self.n = 0\n"
               "    def add(self, x):\n        self.n += x\n        return x",
        "init": "self.stats = Stats()", "call": "n = self.stats.add(1)"},
    "a function in the state that calls one that keeps": {
        "top": "def tell(x):\n    SEEN[x] = 1\n\ndef ask(x):\n    tell(x)\n    return x",
        "init": "self.prep = ask", "call": "n = self.prep(1)"},
    "a closure that calls a method that sets": {
        "init": "self.f = lambda x: self.fill(x)", "call": "n = self.f(1)",
        "more": "def fill(self, x):\n        self.y = x"},
    "a list that grows in an object of the state": {
        "top": "class Net:\n    def go(self, x):\n        x.append(1)\n        return x",
        "init": STATE + "\n        self.net = Net()", "call": "n = self.net.go(self.items)"},
    "a class in the state that imports": {
        "top": "class Net:\n    def go(self, x):\n        from cfg import X\n        return X",
        "init": "self.net = Net()", "call": "n = self.net.go(1)"},
    "a function in the state that keeps": {
        "top": "def tell(x):\n    SEEN[x] = 1\n    return x",
        "init": "self.prep = tell", "call": "n = self.prep(1)"},
    "a closure in the state": {
        "init": "items = []\n        def f(x):\n            items.append(x)\n            return x"
                "\n        self.f = f", "call": "n = self.f(1)"},
    "an imported function in the state that keeps": {
        "init": "from cfg import keep\n        self.prep = keep", "call": "n = self.prep(1)"},
    # What construction finds that is not followed
    "an instance of a base that calls check": {
        "top": "class Base:\n    pass", "bases": "(Base)", "init": "self.child = Base()",
        "call": "n = isinstance(self.child, Base)"},
    "a function in the state that checks a base": {
        "top": "class Base:\n    pass\n\ndef is_one(x):\n    return isinstance(x, Base)",
        "bases": "(Base)", "init": "self.f = is_one", "call": "n = self.f(self)"},
    "an object that is unpickled": {
        "top": "import pickle as pkl", "init": "self.r = pkl.loads(path)", "call": "n = Row(1)"},
    "an object that is unpickled by a name": {"init": "from joblib import load\n"
                                              "        self.r = load(path)"},
    "an object of any class that torch loads": {
        "top": "import torch", "init": "self.r = torch.load(path, weights_only=False)"},
    "a class that is found by its base": {"init": "self.r = object.__subclasses__()[0]()"},
    "a module that is found by its name": {"top": "import sys",
                                           "init": "setattr(sys.modules['cfg'], 'X', 2)"},
    "a function that both pass on": {"init": "self.f = prep", "call": "n = self.f is prep"},
    "an attribute of a function": {"init": "setattr(prep, 'n', 1)", "call": "n = prep.n"},
    # Settings that construction makes
    "random numbers that begin with construction": {"init": "random.seed(0)"},
    "a value that settings show in": {
        "top": "ONES = np.ones(2)", "init": "np.seterr(all='raise')\n        np.kept = 1",
        "call": "n = ONES"},
    "an environment variable that is read on import": {
        "top": "import os\nN = os.environ.get('N')", "init": "os.environ['N'] = '1'",
        "call": "n = N"},
    "a counter of a decorator": {
        "top": "def counted(f):\n    n = 0\n    def inner(self):\n        nonlocal n\n"
               "        n += 1\n        return n\n    return inner",
        "init": "self.n = self.go()", "call": "n = self.go()",
        "more": "@counted\n    def go(self):\n        pass"},
    # The same memory by another name
    "an array of another shape": {"init": STATE, "call": "m = self.model.reshape(-1); m[0] = 1"},
    "an array that may be no copy": {
        "init": STATE, "call": "m = self.model.astype(float, copy=False)"},
    "an array that a function gives another shape": {
        "init": STATE, "call": "m = np.transpose(self.model); m += 1"},
    "an array that a function works on in place": {
        "init": STATE, "call": "m = np.nan_to_num(self.model, copy=False)"},
    "a list in a table of the call": {"init": STATE,
                                      "call": "d = {'k': self.items}; d['k'] += [1]"},
    "a database": {"init": STATE, "call": "n = self.model.execute('insert ...').rowcount"},
    "processes that stay": {"top": "import joblib", "call": "n = joblib.Parallel(2)([])"},
}  # fmt: skip
SAFE: dict[str, dict[str, str]] = {
    "nothing": {},
    "a dataclass": {"decorator": "@dataclass", "body": "n: int = 1\n    m: list = field("
                    "default_factory=list)"},
    "a static method": {"more": "@staticmethod\n    def f(x):\n        return x",
                        "call": "n = self.f(1)"},
    "a property": {"more": "@property\n    def y(self):\n        return self.x",
                   "call": "n = self.y"},
    "a list of the state's": {"init": STATE,
                              "call": "out = [i for i in self.items]; out.append(1)"},
    "a list of the call": {"call": "out = []\n        out.append(1)\n        out[0] = 2"},
    "columns of the batch": {"call": "batch['y'] = 1"},
    "what the model gives": {"init": STATE, "call": "out = self.model.run(batch).to('cpu').float()"
                             "\n        out[0] = 1"},
    "prints": {"call": "print(self.x)"},
    "a lock": {"init": "self.lock = threading.Lock()", "call": "with self.lock: pass"},
    "a function in the state": {"init": "self.prep = prep", "call": "n = self.prep(1)"},
    "a lambda in the state": {"init": "self.f = lambda x: x + self.x", "call": "n = self.f(1)"},
    "a class of the call": {"call": "r = Row(1)\n        r.x = 2"},
    "a class of the state": {"init": "self.r = Row(1)", "call": "n = self.r.x"},
    "a network": {
        "top": "class Net(threading.local):\n    def forward(self, x):\n"
               "        x = x.float().to('cpu')\n        return self.layer(x)",
        "init": "self.net = Net().eval().to('cpu')", "call": "n = self.net(batch)"},
    "a constant of a module": {"init": "from plain import SIZE\n        self.n = SIZE",
                               "call": "from plain import SIZE\n        n = SIZE"},
    "a fixed value that is computed": {"top": "LIMIT = len('abc')", "init": "self.n = LIMIT",
                                       "call": "n = LIMIT"},
    "a sorted list": {"init": STATE, "call": "n = sorted(self.items, key=lambda i: -i)"},
    "a generator": {"call": "yield batch"},
    "settings that no value shows": {
        "top": "import os\nimport re\nNAMES = ['a']\nWORD = re.compile('a')",
        "init": "os.environ['N'] = '1'", "call": "n = NAMES, WORD"},
    "weights that are loaded": {"top": "import torch", "init": "self.w = torch.load(path)"},
    "an array that is copied": {"init": STATE, "call": "m = self.model.copy(); m[0] = 1"},
    "what a model gives is changed": {"init": STATE,
                                      "call": "m = self.model.encode(1).reshape(-1); m /= 2"},
}  # fmt: skip


def written(project: Project, parts: dict[str, str], **edit: str) -> ConstructorIdentity:
    empty = {
        "top": "",
        "decorator": "",
        "bases": "",
        "body": "",
        "init": "",
        "call": "",
        "more": "",
    }
    text = CLASS.format_map({**empty, **parts})
    cfg = "X = 1\nSTATE = {}\nSEEN = {}\n\ndef keep(x):\n    SEEN[x] = 1\n    return x\n"
    project.write(defs=text, cfg=cfg, plain="SIZE = 3\n")
    return identity(project)


@pytest.mark.parametrize("name", UNSAFE)
def test_where_it_cannot_be_told_the_whole_code_counts(name, project):
    found = written(project, UNSAFE[name])
    assert not found.shares_state
    assert found.reason
    project.edit("defs.py", "return batch", "return [batch]")
    assert identity(project).digest != found.digest


@pytest.mark.parametrize("name", SAFE)
def test_where_it_can_be_told_the_call_can_be_edited(name, project):
    found = written(project, SAFE[name])
    assert found.shares_state, found.reason
    project.edit("defs.py", "return batch", "return [batch]")
    assert identity(project) == found


def test_an_instance_as_an_argument_counts_as_state_of_a_class_that_may_be_edited(project):
    project.write(**FILES)
    model = project.load("Model")
    row = sys.modules["defs"].Net(1)
    for argument in ({"net": [row]}, sys.modules["defs"].scale):
        assert not constructor_identity(model, [argument]).shares_state
    for argument in ({"path": "x", "n": [1, None, 2.5]}, Path("x")):
        assert constructor_identity(model, [argument]).shares_state


def test_a_version_does_not_stand_for_the_code_of_workers(project):
    project.write(**{**FILES, "defs": MODEL.replace("WIDTH = 4", "WIDTH = []")})
    before = identity(project, version="1")
    assert not before.shares_state
    project.edit("defs.py", "FACTOR = 2", "FACTOR = 3")
    assert code_identity(project.load("Model"), version="1").digest
    assert identity(project, version="1").digest != before.digest


# Functions


FUNCTION = """
import functools
import os

SEEN = {{}}
FACTOR = 2
{top}

def helper(x):
    return FACTOR * x

def Model(batch):
    {body}
    return helper(batch)

def other(batch):
    return batch
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return helper(batch)", "return 3 * batch"),
        ("FACTOR * x", "FACTOR + x"),
        ("FACTOR = 2", "FACTOR = 4"),
    ],
)
def test_an_edit_of_a_function_keeps_its_workers(old, new, project):
    project.write(defs=FUNCTION.format(top="", body="pass"))
    before = identity(project)
    assert before.shares_state, before.reason
    project.edit("defs.py", old, new)
    assert identity(project) == before


def test_two_functions_have_workers_of_their_own(project):
    project.write(defs=FUNCTION.format(top="", body="pass"))
    found = {constructor_identity(project.load(name)).digest for name in ("Model", "other")}
    assert len(found) == 2


@pytest.mark.parametrize(
    ("top", "body"),
    [
        ("@functools.lru_cache\ndef model():\n    return []", "model()"),
        ("", "SEEN['a'] = 1"),
        ("", "SEEN.setdefault('a', 1)"),
        ("", "global FACTOR; FACTOR = 3"),
        ("", "os.environ['A'] = '1'"),
        ("", "Model.count = 1"),
        ("class M:\n    n = 0\n    @classmethod\n    def up(cls):\n        cls.n += 1", "M.up()"),
    ],
)
def test_an_edit_of_a_function_that_keeps_state_makes_a_new_pool(top, body, project):
    project.write(defs=FUNCTION.format(top=top, body=body))
    before = identity(project)
    assert not before.shares_state
    project.edit("defs.py", "return helper(batch)", "return 3 * batch")
    assert identity(project).digest != before.digest


def test_what_importing_does_counts_for_a_function(project):
    project.write(defs=FUNCTION.format(top="os.environ['A'] = '1'", body="pass"))
    before = identity(project)
    assert before.shares_state, before.reason
    project.edit("defs.py", "'1'", "'2'")
    assert identity(project).digest != before.digest
