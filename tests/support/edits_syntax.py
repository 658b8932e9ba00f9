"""Edits of code text: factories, docstrings, type hints, local names and strings that import."""

# ruff: noqa: E501  # one edit a line

from __future__ import annotations

from dataclasses import replace

from support.edits import Edit


def _edit(name: str, defs: str, old: str, new: str, changes: bool = True, **files: str) -> Edit:
    """Return an edit of ``defs.py``; others are ``module="text"``, edited if ``old`` is there."""
    texts = {"defs.py": defs, **{f"{module}.py": text for module, text in files.items()}}
    places = [file for file, text in texts.items() if old in text]
    assert len(places) == 1, (name, places)
    return Edit(f"syntax: {name}", texts, places[0], old, new, changes)


def _kept(name: str, defs: str, old: str, new: str, **files: str) -> Edit:
    return _edit(name, defs, old, new, False, **files)


def _made(body: str, *, head: str = "") -> str:
    """Return a class that ``make`` creates, with the given body and surroundings."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"{head}def make(n):\n{lines}    return Model\nudf = make(3)\n"


_CALL = "    def __call__(self, b):\n        return b * self.SIZE\n"
_THREE, _FOUR = "udf = make(3)", "udf = make(4)"

FACTORIES = [
    _edit(
        f"factory: {name}", _made(body, head=head), _THREE, _FOUR
    )
    for name, body, head in [
        ("class attribute", f"class Model:\n    SIZE = n\n{_CALL}", ""),
        ("type()", "Model = type('M', (Base,), {'SIZE': n})", f"class Base:\n{_CALL}"),
        (
            "default argument",
            "class Model:\n    def __call__(self, b, m=n * 2):\n        return b * m",
            "",
        ),
        (
            "make_dataclass",
            "Model = dataclasses.make_dataclass('M', [('SIZE', int, n)], bases=(Base,))",
            f"import dataclasses\nclass Base:\n{_CALL}",
        ),
        (
            "enum",
            "class Kind(enum.Enum):\n    A = n\nclass Model:\n    def __call__(self, b):\n"
            "        return Kind.A.value",
            "import enum\n",
        ),
        (
            "pydantic default",
            "class Config(pydantic.BaseModel):\n    size: int = n\nclass Model:\n"
            "    def __call__(self, b):\n        return Config().size",
            "import pydantic\n",
        ),
        (
            "method that is set",
            "def run(self, b):\n    return b * n\nclass Model:\n    pass\nModel.__call__ = run",
            "",
        ),
        (
            "function attribute",
            "def Model(b):\n    return b * Model.size\nModel.size = n",
            "",
        ),
    ]
] + [
    _edit(
        "factory: captured variables exchanged",
        "def make(n):\n    x, y = n, 2\n    def f(b):\n        return x - y\n    return f\n"
        "udf = make(1)\n",
        "x - y",
        "y - x",
    ),
    _kept(
        "factory: another use of it",
        _made("class Model:\n    SIZE = n\n" + _CALL) + "other = make(5)\n",
        "make(5)",
        "make(6)",
    ),
]  # fmt: skip

_DOC = '"""Answer the question."""'
_NEW = '"""Answer the question well."""'


def _docs(name: str, defs: str, changes: bool = True, **files: str) -> Edit:
    return _edit(f"docstring: {name}", defs.replace("DOC", _DOC), _DOC, _NEW, changes,
                 **{key: text.replace("DOC", _DOC) for key, text in files.items()})  # fmt: skip


DOCSTRINGS = [
    _docs("module attribute", "import p\ndef udf(b):\n    return p.__doc__ + b\n", p="DOC\nK = 1\n"),
    _docs("module", "DOC\ndef udf(b):\n    return b\n", False),
]  # fmt: skip


def _hint(name: str, defs: str) -> Edit:
    """Return an edit of one hint, which is written as ``HINT``."""
    defs = defs.replace("HINT", "list[int]")
    return _edit(f"hint: {name}", defs, "list[int]", "list[float]")


_MODEL = "class Config(pydantic.BaseModel):\n    SIZE: int = 3\n"
_CONFIG = "class Config:\n    SIZE = 3\n"
HINTS = [
    _hint("pydantic", "import pydantic\nclass C(pydantic.BaseModel):\n    x: HINT\ndef udf(b):\n    return C(x=b)\n"),
    _hint("__annotations__", "class C:\n    x: HINT\ndef udf(b):\n    return C.__annotations__\n"),
    _edit("hint: forward reference", f"import pydantic\n{_MODEL}class C(pydantic.BaseModel):\n    x: 'Config'\ndef udf(b):\n    return C(x=b)\n", "int = 3", "int = 4"),
    _edit("hint: nested forward reference", f"import pydantic\n{_MODEL}class C(pydantic.BaseModel):\n    x: list['Config | None']\ndef udf(b):\n    return C(x=b)\n", "int = 3", "int = 4"),
    _edit("hint: under future annotations", f"from __future__ import annotations\nfrom dataclasses import dataclass\n{_CONFIG}@dataclass\nclass C:\n    x: Config\ndef udf(b):\n    return C(x=b)\n", "SIZE = 3", "SIZE = 4"),
    _kept("hint: a text in one that does not count", f"{_CONFIG}def udf(b: 'Config'):\n    return b\n", "SIZE = 3", "SIZE = 4"),
]  # fmt: skip

LOCALS = [
    _edit("local: a local becomes a global", "x = 5\ndef udf(b):\n    y = 1\n    return y + x\n", "return y + x", "return y + y"),
    _edit("local: locals()", "def udf(b):\n    size = 1\n    return '{}'.format(**locals())\n", "size", "width"),
]  # fmt: skip

_PLUG = "K = 1\ndef f(b):\n    return b + K\n"


def _imported(name: str, head: str, call: str) -> Edit:
    return _edit(f"import: {name}", f"{head}\ndef udf(b):\n    return {call}\n", "K = 1", "K = 2",
                 plug=_PLUG)  # fmt: skip


IMPORTS = [
    _imported("alias of import_module", "from importlib import import_module as load", "load('plug').f(b)"),
    _imported("getattr", "import importlib", "getattr(importlib, 'import_module')('plug').f(b)"),
    _imported("pydoc.locate", "import pydoc", "pydoc.locate('plug').f(b)"),
    _imported("resolve_name", "import pkgutil", "pkgutil.resolve_name('plug:f')(b)"),
    _imported("__import__", "", "__import__('plug').f(b)"),
    _imported("runpy", "import runpy", "runpy.run_module('plug')['f'](b)"),
    _imported("django", "try:\n    from django.utils.module_loading import import_string\nexcept ImportError:\n    import_string = None", "import_string('plug.f')(b)"),
    _imported("Hydra's target", "def instantiate(c): ...", "instantiate({'_target_': 'plug.f'})(b)"),
    _imported("name in a constant", "import importlib\nNAME = 'plug'", "importlib.import_module(NAME).f(b)"),
    _imported("exec", "", "exec('import plug; plug.f(1)')"),
    _imported("spec from a file", "import importlib.util as u", "u.spec_from_file_location('plug', 'plug.py')"),
    _edit("import: alias of another module", "from load import imp\ndef udf(b):\n    return imp('plug').f(b)\n", "K = 1", "K = 2", plug=_PLUG, load="import importlib\nimp = importlib.import_module\n"),
    _kept("import: a module that is not named", "import importlib\ndef udf(b):\n    return importlib.import_module('plug').f(b)\n", "Q = 1", "Q = 2", plug=_PLUG, other="Q = 1\n"),
]  # fmt: skip

EVALUATED = [
    _edit("eval: exec of statements", "K = 1\ndef udf(b):\n    exec('print(K)')\n", "K = 1\n", "K = 2\n"),
    _edit("eval: own module by sys.modules", "import sys\nK = 1\ndef udf(b):\n    return getattr(sys.modules[__name__], b)\n", "K = 1\n", "K = 2\n"),
    _edit("eval: globals by a name", "K = 1\ndef udf(b):\n    return globals()[b]\n", "K = 1\n", "K = 2\n"),
    _kept("eval: of a model", "K = 1\ndef udf(b):\n    return b.eval()\n", "K = 1\n", "K = 2\n"),
]  # fmt: skip

# Docstrings, hints and local names count, also where nothing reads them.
TEXTS = [
    replace(edit, needless=not edit.changes and edit.name != "syntax: docstring: module")
    for edit in (*DOCSTRINGS, *HINTS, *LOCALS)
]

EDITS = [*FACTORIES, *TEXTS, *IMPORTS, *EVALUATED]
