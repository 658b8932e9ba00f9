"""Edits of values that are passed to a function, and of the files and folders that they name."""

from __future__ import annotations

from collections.abc import Mapping

from support.edits import Edit

_PARTIAL = """
import functools
import given

def f(batch, x):
    return batch

udf = functools.partial(f, x=given.X)
"""
_PYDANTIC = """
import pydantic

class Base(pydantic.BaseModel):
    a: int = 0

class Child(Base):
    b: int = 0

    def scaled(self):
        return self.b * 2

class Hidden(pydantic.BaseModel):
    rate: float = pydantic.Field(0.5, exclude=True)

class Holder(pydantic.BaseModel):
    one: Base = Base()
    many: list[Base] = []
"""
_RECORDS = """
import dataclasses
import functools

@dataclasses.dataclass
class Options:
    size: int = 1

def having(value, **attributes):
    for name, item in attributes.items():
        setattr(value, name, item)
    return value
"""
_NUMPY = "import numpy as np\n"
_PANDAS = "import pandas as pd\n"
_ARROW = "import pyarrow as pa\n"
_PLAIN = "import collections, enum, functools, re, types\n"


def _value(name: str, setup: str, old: str, new: str, changes: bool = True) -> Edit:
    """Return an edit of a value that is passed by `functools.partial`."""
    files = {"defs.py": _PARTIAL, "given.py": f"{setup}\nX = {old}\n"}
    return Edit(f"value: {name}", files, "given.py", f"X = {old}\n", f"X = {new}\n", changes)


def _file(
    name: str,
    value: str,
    file: str,
    changes: bool = True,
    setup: str = "",
    others: Mapping[str, str] | None = None,
) -> Edit:
    """Return an edit of a file, for a value that names a file or folder."""
    files = {"defs.py": _PARTIAL, "given.py": f"{setup}\nX = {value}\n", **(others or {})}
    return Edit(f"file: {name}", {**files, file: "one"}, file, "one", "two", changes)


def _default(name: str, code: str) -> Edit:
    """Return an edit of a file that a default names."""
    return Edit(
        f"default: {name}", {"defs.py": code, "model/weights": "one"}, "model/weights", "one", "two"
    )


_MODEL = '"{root}/model"'
_IN_FOLDERS = [
    _file("a vocabulary without a suffix", '"{root}/vocab"', "vocab"),
    _file("a file URL", '"file://{root}/model"', "model/x/weights"),
    _file("a path", f"pathlib.Path({_MODEL})", "model/x", setup="import pathlib"),
    _file("a path as bytes", f"{_MODEL}.encode()", "model/x"),
    _file("in a list", f"[1, ({_MODEL},)]", "model/x"),
    _file("in an array", f"np.array([{_MODEL}])", "model/x", setup=_NUMPY),
    _file("in a table", f'pa.table({{"a": [{_MODEL}]}})', "model/x", setup=_ARROW),
    _file("a hidden file that is named", '"{root}/.settings"', ".settings"),
    # Edits that do not count:
    _file("hidden", _MODEL, "model/.cache/when", False, others={"model/x": "1"}),
    _file("a tagged cache", _MODEL, "model/c/x", False, others={"model/c/CACHEDIR.TAG": ""}),
    _file("a model hub's cache", _MODEL, "model/models--a--b/x", False, others={"model/x": "1"}),
    _file("a remote URL", '"s3:/{root}/model"', "model/x", False),
]  # fmt: skip
_CLASS = "class udf:\n    def __init__(self, {0}):\n        pass\n\n    def __call__(self, b{1}):\n"
_IN_DEFAULTS = [
    _default("a function's", f"def udf(batch, path={_MODEL}):\n    return batch\n"),
    _default("a constructor's", _CLASS.format(f"path={_MODEL}", "") + "        return b\n"),
    _default(
        "a dataclass's field",
        f"import dataclasses\n\n@dataclasses.dataclass\nclass udf:\n    path: str = {_MODEL}\n\n"
        "    def __call__(self, batch):\n        return batch\n",
    ),
    _default(
        "a closure's",
        "def make(path):\n    def inner(batch):\n        return path\n    return inner\n\n"
        f"udf = make({_MODEL})\n",
    ),
]
_VALUES = [
    _value("a dict's order", "", '{"a": 1, "b": 2}', '{"b": 2, "a": 1}'),
    _value("a factory", _PLAIN, "collections.defaultdict(int)", "collections.defaultdict(float)"),
    _value("a generic type", "", "list[int]", "list[float]"),
    _value("a model's subclass", _PYDANTIC, "Holder(one=Base())", "Holder(one=Child())"),
    _value("an excluded field", _PYDANTIC, "Hidden(rate=0.5)", "Hidden(rate=0.6)"),
    Edit("value: a nested model's method", {"defs.py": _PARTIAL,
         "given.py": _PYDANTIC + "\nX = Holder(many=[Child()])\n"}, "given.py", "self.b * 2",
         "self.b * 3"),
    _value("a dataclass's attribute", _RECORDS, "having(Options(), more=1)",
           "having(Options(), more=2)"),
    _value("categories", _PANDAS, 'pd.Series(pd.Categorical(["a"], ["a", "b"]))',
           'pd.Series(pd.Categorical(["a"], ["b", "a"]))'),
    _value("a dictionary's order", _ARROW,
           'pa.DictionaryArray.from_arrays([0], ["a", "b"])',
           'pa.DictionaryArray.from_arrays([1], ["b", "a"])'),
    # Edits that do not count:
    _value("a set's order", "", '{"a", "b"}', '{"b", "a"}', False),
    _value("arguments by name", _RECORDS, "Options(2)", "Options(size=2)", False),
    _value("chunks", _ARROW, "pa.chunked_array([[1, 2]])", "pa.chunked_array([[1], [2]])", False),
]  # fmt: skip
EDITS = [*_IN_FOLDERS, *_IN_DEFAULTS, *_VALUES]
