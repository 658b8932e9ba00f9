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


def _made(body: str, *, head: str = "", argument: str = "3") -> str:
    """Return a class that ``make`` creates, with the given body and surroundings."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"{head}def make(n):\n{lines}    return Model\nudf = make({argument})\n"


_CALL = "    def __call__(self, b):\n        return b * self.SIZE\n"
_THREE, _FOUR = "udf = make(3)", "udf = make(4)"

FACTORIES = [
    _edit(
        f"factory: {name}", _made(body, head=head), _THREE, _FOUR
    )
    for name, body, head in [
        ("class attribute", f"class Model:\n    SIZE = n\n{_CALL}", ""),
        ("attribute set later", f"class Model:\n{_CALL}Model.SIZE = n", ""),
        ("attribute by setattr", f"class Model:\n{_CALL}setattr(Model, 'SIZE', n)", ""),
        ("type()", "Model = type('M', (Base,), {'SIZE': n})", f"class Base:\n{_CALL}"),
        (
            "type() named as another class",
            "Model = type('Base', (Base,), {'SIZE': n})",
            f"class Base:\n    SIZE = 1\n{_CALL}",
        ),
        (
            "decorator",
            f"@sized(n)\nclass Model:\n{_CALL}",
            "def sized(n):\n    def deco(cls):\n        cls.SIZE = n\n        return cls\n"
            "    return deco\n",
        ),
        (
            "base by a variable",
            "base = (A, B)[n == 3]\nclass Model(base):\n    def __call__(self, b):\n"
            "        return self.f(b)",
            "class A:\n    def f(self, b):\n        return b\n"
            "class B:\n    def f(self, b):\n        return -b\n",
        ),
        (
            "default argument",
            "class Model:\n    def __call__(self, b, m=n * 2):\n        return b * m",
            "",
        ),
        (
            "partialmethod",
            "class Model:\n    def f(self, b, m):\n        return b * m\n"
            "    __call__ = functools.partialmethod(f, m=n)",
            "import functools\n",
        ),
        (
            "property",
            f"class Model:\n    SIZE = property(lambda self: n)\n{_CALL}",
            "",
        ),
        (
            "property without a closure",
            "def get(self, m=n):\n    return m\n"
            f"class Model:\n    SIZE = property(get)\n{_CALL}",
            "",
        ),
        (
            "cached property",
            f"class Model:\n    @functools.cached_property\n    def SIZE(self):\n        return n\n{_CALL}",
            "import functools\n",
        ),
        (
            "slots",
            "class Model:\n    __slots__ = ('a', 'b')[:n - 2]\n    def __call__(self, b):\n"
            "        return len(self.__slots__)",
            "",
        ),
        (
            "nested class",
            "class Model:\n    class Config:\n        SIZE = n\n    def __call__(self, b):\n"
            "        return b * self.Config.SIZE",
            "",
        ),
        (
            "dataclass field",
            f"@dataclasses.dataclass\nclass Model:\n    SIZE: int = n\n{_CALL}",
            "import dataclasses\n",
        ),
        (
            "dataclass default factory",
            "@dataclasses.dataclass\nclass Model:\n"
            f"    SIZE: list = dataclasses.field(default_factory=lambda: [n])\n{_CALL}",
            "import dataclasses\n",
        ),
        (
            "make_dataclass",
            "Model = dataclasses.make_dataclass('M', [('SIZE', int, n)], bases=(Base,))",
            f"import dataclasses\nclass Base:\n{_CALL}",
        ),
        (
            "namedtuple",
            "P = collections.namedtuple('P', 'x', defaults=[n])\nclass Model:\n    POINT = P\n"
            "    def __call__(self, b):\n        return self.POINT().x",
            "import collections\n",
        ),
        (
            "NamedTuple",
            "class P(typing.NamedTuple):\n    x: int = n\nclass Model:\n"
            "    def __call__(self, b):\n        return P().x",
            "import typing\n",
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
            "pydantic constraint",
            "class Config(pydantic.BaseModel):\n    size: int = pydantic.Field(n, ge=0)\n"
            "class Model:\n    def __call__(self, b):\n        return Config().size",
            "import pydantic\n",
        ),
        (
            "values of __init_subclass__",
            f"class Model(Base, size=n):\n{_CALL}",
            "class Base:\n    def __init_subclass__(cls, size):\n        cls.SIZE = size\n",
        ),
        (
            "metaclass by a variable",
            "meta = (A, B)[n == 3]\nclass Model(metaclass=meta):\n    def __call__(self, b):\n"
            "        return type(self).size",
            "class A(type):\n    size = 1\nclass B(type):\n    size = 2\n",
        ),
        (
            "descriptor",
            f"class Model:\n    SIZE = Size(n)\n{_CALL}",
            "class Size:\n    def __init__(self, n):\n        self.n = n\n"
            "    def __get__(self, obj, owner):\n        return self.n\n",
        ),
        (
            "method that is set",
            "def run(self, b):\n    return b * n\nclass Model:\n    pass\nModel.__call__ = run",
            "",
        ),
        (
            "captured in a nested function of a method",
            "class Model:\n    def __call__(self, b):\n        def f():\n            return n\n"
            "        return f()",
            "",
        ),
        (
            "value in a container",
            "class Model:\n    TABLE = {'a': [n]}\n    def __call__(self, b):\n"
            "        return self.TABLE",
            "",
        ),
        (
            "lock made of the value",
            "class Model:\n    GATE = threading.Semaphore(n)\n    def __call__(self, b):\n"
            "        return self.GATE._value",
            "import threading\n",
        ),
        (
            "function attribute",
            "def Model(b):\n    return b * Model.size\nModel.size = n",
            "",
        ),
        (
            "docstring of the function",
            "def Model(b):\n    return Model.__doc__ + b\nModel.__doc__ = f'Take {n}.'",
            "",
        ),
    ]
] + [
    _edit(
        "factory: text of a method that is set",
        _made(
            "def run(self, b):\n    return b + n\nclass Model:\n    pass\nModel.__call__ = run"
        ),
        "b + n",
        "b - n",
    ),
    _edit(
        "factory: text of a nested class",
        _made("class Model:\n    class C:\n        K = 1\n    def __call__(self, b):\n        pass"),
        "K = 1",
        "K = 2",
    ),
    _edit(
        "factory: captured variables exchanged",
        "def make(n):\n    x, y = n, 2\n    def f(b):\n        return x - y\n    return f\n"
        "udf = make(1)\n",
        "x - y",
        "y - x",
    ),
    replace(
        _kept(
            "factory: a captured local is renamed",
            "def make(n):\n    zed, y = n, 2\n    def f(b):\n        return zed - y\n    return f\n"
            "udf = make(1)\n",
            "zed",
            "a",
        ),
        needless=True,
    ),
    replace(
        _kept(
            "factory: a lock in the class body",
            _made("class Model:\n    LOCK = threading.Lock()\n    SIZE = 1\n" + _CALL,
                  head="import threading\n# here\n"),
            "# here",
            "# there",
        ),
        needless=True,
    ),
    _kept(
        "factory: a function's own cache",
        "def make(n):\n    def f(b):\n        f.seen[b] = 1\n        return b\n    f.seen = {}\n"
        "    return f\nudf = make(1)\nudf.seen['a'] = 1\n# 1\n",
        "# 1",
        "# 2",
    ),
    _kept(
        "factory: another use of it",
        _made("class Model:\n    SIZE = n\n" + _CALL) + "other = make(5)\n",
        "make(5)",
        "make(6)",
    ),
    replace(
        _kept(
            "factory: docstring of the class",
            _made('class Model:\n    """One."""\n    SIZE = n\n' + _CALL),
            "One.",
            "Two.",
        ),
        needless=True,
    ),
]  # fmt: skip

_DOC = '"""Answer the question."""'
_NEW = '"""Answer the question well."""'


def _docs(name: str, defs: str, changes: bool = True, **files: str) -> Edit:
    return _edit(f"docstring: {name}", defs.replace("DOC", _DOC), _DOC, _NEW, changes,
                 **{key: text.replace("DOC", _DOC) for key, text in files.items()})  # fmt: skip


DOCSTRINGS = [
    _docs("own module's", "DOC\ndef udf(b):\n    return __doc__ + b\n"),
    _docs("module attribute", "import p\ndef udf(b):\n    return p.__doc__ + b\n", p="DOC\nK = 1\n"),
    _docs("of its own class", "class udf:\n    DOC\n    def __call__(self, b):\n        return type(self).__doc__\n"),
    _docs(
        "read by a base class",
        "class Base:\n    def __call__(self, b):\n        return self.__doc__\n"
        "class udf(Base):\n    DOC\n",
    ),
    _docs(
        "a bound method",
        "import click\nclass Tools:\n    def find(self):\n        DOC\n"
        "def udf(b):\n    return click.command()(Tools().find)\n",
    ),
    _docs("getsource", "import inspect\ndef p():\n    DOC\ndef udf(b):\n    return inspect.getsource(p)\n"),
    _edit(
        "docstring: of a class made at run time",
        "def make(text):\n    return type('M', (), {'__doc__': text, '__call__': lambda s, b: s})\n"
        "udf = make('one')\n",
        "'one'",
        "'two'",
    ),
    _docs("plain function", "def p(b):\n    DOC\n    return b\ndef udf(b):\n    return p(b)\n", False),
    _docs("module", "DOC\ndef udf(b):\n    return b\n", False),
    _docs("helper module", "import p\ndef udf(b):\n    return p.f(b)\n", False, p="DOC\ndef f(b):\n    return b\n"),
    _docs(
        "dataclass",
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass C:\n    DOC\n    x: int = 1\n"
        "def udf(b):\n    return C().x\n",
        False,
    ),
    _kept(
        "docstring: a bare text",
        "def udf(b):\n    x = 1\n    'a note'\n    return b\n",
        "a note",
        "another",
    ),
]  # fmt: skip


def _hint(name: str, defs: str, changes: bool = True, **files: str) -> Edit:
    """Return an edit of one hint, which is written as ``HINT``."""
    return _edit(f"hint: {name}", defs.replace("HINT", "list[int]"), "list[int]", "list[float]",
                 changes, **files)  # fmt: skip


_MODEL = "class Config(pydantic.BaseModel):\n    SIZE: int = 3\n"
_CONFIG = "class Config:\n    SIZE = 3\n"
HINTS = [
    _hint("dataclass", "from dataclasses import dataclass, fields\n@dataclass\nclass C:\n    x: HINT\ndef udf(b):\n    return C(b)\n"),
    _hint("pydantic", "import pydantic\nclass C(pydantic.BaseModel):\n    x: HINT\ndef udf(b):\n    return C(x=b)\n"),
    _hint("own base of pydantic's", "import pydantic\nclass B(pydantic.BaseModel): pass\nclass C(B):\n    x: HINT\ndef udf(b):\n    return C(x=b)\n"),
    _hint("NamedTuple", "from typing import NamedTuple\nclass C(NamedTuple):\n    x: HINT\ndef udf(b):\n    return C(b)\n"),
    _hint("TypedDict", "import typing\nclass C(typing.TypedDict):\n    x: HINT\ndef udf(b):\n    return C(x=b)\n"),
    _hint("attrs", "import attr\n@attr.s(auto_attribs=True)\nclass C:\n    x: HINT\ndef udf(b):\n    return C(b)\n"),
    _hint("get_type_hints", "import typing\ndef f(x: HINT): ...\ndef udf(b):\n    return typing.get_type_hints(f)\n"),
    _hint("inspect.signature", "from inspect import signature as s\ndef f(x: HINT): ...\ndef udf(b):\n    return s(f)\n"),
    _hint("__annotations__", "class C:\n    x: HINT\ndef udf(b):\n    return C.__annotations__\n"),
    _edit("hint: singledispatch", "import functools\n@functools.singledispatch\ndef f(x): ...\n@f.register\ndef _(x: int): ...\ndef udf(b):\n    return f(b)\n", "x: int", "x: float"),
    _hint("the function itself", "def udf(b: HINT):\n    return b\n", False),
    _hint("local variable", "def udf(b):\n    x: HINT = b\n    return x\n", False),
    _kept("hint: helper module", "import p\ndef udf(b):\n    return p.f(b)\n", "x: str", "x: bytes", p="def f(x: str):\n    return x\n"),
    _kept("hint: added to a local variable", "def udf(b):\n    x = b\n    return x\n", "x = b", "x: int = b"),
    _kept("hint: added to a constant", "K = 1\ndef udf(b):\n    return K\n", "K = 1", "K: int = 1"),
    _kept("hint: added to a function", "def udf(b):\n    return b\n", "(b):", "(b: int) -> int:"),
    _edit("hint: forward reference", f"import pydantic\n{_MODEL}class C(pydantic.BaseModel):\n    x: 'Config'\ndef udf(b):\n    return C(x=b)\n", "int = 3", "int = 4"),
    _edit("hint: nested forward reference", f"import pydantic\n{_MODEL}class C(pydantic.BaseModel):\n    x: list['Config | None']\ndef udf(b):\n    return C(x=b)\n", "int = 3", "int = 4"),
    _edit("hint: under future annotations", f"from __future__ import annotations\nfrom dataclasses import dataclass\n{_CONFIG}@dataclass\nclass C:\n    x: Config\ndef udf(b):\n    return C(x=b)\n", "SIZE = 3", "SIZE = 4"),
    _edit("hint: of another module", "import pydantic, kinds\nclass C(pydantic.BaseModel):\n    x: kinds.K\ndef udf(b):\n    return C(x=b)\n", "int", "float", kinds="K = int\n"),
    _edit("hint: Literal", "import pydantic, typing\nclass C(pydantic.BaseModel):\n    x: typing.Literal['a']\ndef udf(b):\n    return C(x=b)\n", "['a']", "['b']"),
    _edit("hint: Annotated", "import pydantic, typing\nclass C(pydantic.BaseModel):\n    x: typing.Annotated[int, 'how many']\ndef udf(b):\n    return C(x=b)\n", "how many", "how much"),
    _edit("hint: order of fields", "from dataclasses import dataclass\n@dataclass\nclass C:\n    x: int\n    y: int\ndef udf(b):\n    return C(1, 2)\n", "    x: int\n    y: int\n", "    y: int\n    x: int\n"),
    _edit("hint: a text that is no expression", "from typing import Literal\ndef udf(b, kind: Literal['return', 'pass'] = 'return'):\n    return b\n", "'pass'", "'del x'"),
    _kept("hint: a name in one that does not count", f"{_CONFIG}def udf(b: Config):\n    return b\n", "SIZE = 3", "SIZE = 4"),
    _kept("hint: a text in one that does not count", f"{_CONFIG}def udf(b: 'Config'):\n    return b\n", "SIZE = 3", "SIZE = 4"),
]  # fmt: skip

LOCALS = [
    _kept(f"local: {name}", f"import contextlib\nK = 1\n{defs}", old, new)
    for name, defs, old, new in [
        ("variable", "def udf(b):\n    total = b + 1\n    return total * 2\n", "total", "summed"),
        ("loop", "def udf(b):\n    for item in b:\n        print(item)\n", "item", "row"),
        ("comprehension at the top", "LIST = [item for item in range(3)]\ndef udf(b):\n    return LIST\n", "item", "x"),
        ("lambda", "def udf(b):\n    step = lambda x: x\n    return step(b)\n", "step", "go"),
        ("match mapping", "def udf(b):\n    match b:\n        case {'a': 1, **more}:\n            return more\n", "more", "left"),
    ]
] + [
    _edit(f"local: {name}", defs, old, new)
    for name, defs, old, new in [
        ("another variable is used", "def udf(b):\n    x = 1\n    y = 2\n    return x\n", "return x", "return y"),
        ("a local becomes a global", "x = 5\ndef udf(b):\n    y = 1\n    return y + x\n", "return y + x", "return y + y"),
        ("it shadows a constant no longer", "K = 2\ndef udf(b):\n    K = 1\n    return K\n", "    K = 1\n", "    L = 1\n"),
        ("a parameter", "def f(a):\n    return a\ndef udf(b):\n    return f(**b)\n", "def f(a):\n    return a", "def f(c):\n    return c"),
        ("locals()", "def udf(b):\n    size = 1\n    return '{}'.format(**locals())\n", "size", "width"),
        ("global", "x = 1\ndef udf(b):\n    global x\n    x = 2\n    y = 3\n    return x\n", "return x", "return y"),
    ]
]  # fmt: skip

_PLUG = "K = 1\ndef f(b):\n    return b + K\n"


def _imported(name: str, head: str, call: str) -> Edit:
    return _edit(f"import: {name}", f"{head}\ndef udf(b):\n    return {call}\n", "K = 1", "K = 2",
                 plug=_PLUG)  # fmt: skip


IMPORTS = [
    _imported("alias of import_module", "from importlib import import_module as load", "load('plug').f(b)"),
    _imported("variable", "import importlib\nload = importlib.import_module", "load('plug').f(b)"),
    _imported("local variable", "import importlib", "(lambda: 0)() or importlib.import_module('plug').f(b)"),
    _imported("module under another name", "import importlib as il", "il.import_module('plug').f(b)"),
    _imported("getattr", "import importlib", "getattr(importlib, 'import_module')('plug').f(b)"),
    _imported("pydoc.locate", "import pydoc", "pydoc.locate('plug').f(b)"),
    _imported("locate of a function", "from pydoc import locate as find", "find('plug.f')(b)"),
    _imported("resolve_name", "import pkgutil", "pkgutil.resolve_name('plug:f')(b)"),
    _imported("__import__", "", "__import__('plug').f(b)"),
    _imported("builtins.__import__", "import builtins as bi", "bi.__import__('plug').f(b)"),
    _imported("runpy", "import runpy", "runpy.run_module('plug')['f'](b)"),
    _imported("django", "try:\n    from django.utils.module_loading import import_string\nexcept ImportError:\n    import_string = None", "import_string('plug.f')(b)"),
    _imported("Hydra's target", "def instantiate(c): ...", "instantiate({'_target_': 'plug.f'})(b)"),
    _imported("sys.modules", "import sys", "sys.modules['plug'].f(b)"),
    _imported("name in a constant", "import importlib\nNAME = 'plug'", "importlib.import_module(NAME).f(b)"),
    _imported("exec", "", "exec('import plug; plug.f(1)')"),
    _imported("spec from a file", "import importlib.util as u", "u.spec_from_file_location('plug', 'plug.py')"),
    _imported("passed on", "import importlib", "list(map(importlib.import_module, b))"),
    _imported("in a partial", "import importlib, functools\nload = functools.partial(importlib.import_module, 'plug')", "load().f(b)"),
    _edit("import: alias of another module", "from load import imp\ndef udf(b):\n    return imp('plug').f(b)\n", "K = 1", "K = 2", plug=_PLUG, load="import importlib\nimp = importlib.import_module\n"),
    _kept("import: an unrelated locate", "class Map:\n    def locate(self, x):\n        return x\ndef udf(b):\n    m = Map()\n    return m.locate(b)\n# 1\n", "# 1", "# 2"),
    _kept("import: a function called run_module", "def run_module(x):\n    return x\ndef udf(b):\n    return run_module(b)\n# 1\n", "# 1", "# 2"),
    _kept("import: a module that is not named", "import importlib\ndef udf(b):\n    return importlib.import_module('plug').f(b)\n", "Q = 1", "Q = 2", plug=_PLUG, other="Q = 1\n"),
]  # fmt: skip

EVALUATED = [
    _edit("eval: literal", "K = 1\ndef udf(b):\n    return eval('K + 1')\n", "K = 1\n", "K = 2\n"),
    _edit("eval: constant", "K = 1\nTEXT = 'K + 1'\ndef udf(b):\n    return eval(TEXT)\n", "K = 1\n", "K = 2\n"),
    _edit("eval: constant's text", "K = 1\nTEXT = 'K + 1'\ndef udf(b):\n    return eval(TEXT)\n", "K + 1", "K + 2"),
    _edit("eval: built text", "K = 1\ndef udf(b):\n    return eval(b + ' + 1')\n", "K = 1\n", "K = 2\n"),
    _edit("eval: f-string", "K = 1\ndef udf(b):\n    return eval(f'{b} + 1')\n", "K = 1\n", "K = 2\n"),
    _edit("eval: function in the text", "def helper(b):\n    return b\ndef udf(b):\n    return eval('helper(b)')\n", "return b\n", "return -b\n"),
    _edit("eval: exec of statements", "K = 1\ndef udf(b):\n    exec('print(K)')\n", "K = 1\n", "K = 2\n"),
    _edit("eval: compile", "K = 1\ndef udf(b):\n    return eval(compile('K', '', 'eval'))\n", "K = 1\n", "K = 2\n"),
    _edit("eval: under another name", "import builtins\nK = 1\ndef udf(b):\n    return builtins.eval('K')\n", "K = 1\n", "K = 2\n"),
    _edit("eval: own module by sys.modules", "import sys\nK = 1\ndef udf(b):\n    return getattr(sys.modules[__name__], b)\n", "K = 1\n", "K = 2\n"),
    _edit("eval: globals by a name", "K = 1\ndef udf(b):\n    return globals()[b]\n", "K = 1\n", "K = 2\n"),
    _edit("eval: a text that is executed", "import pathlib\nTEXT = pathlib.Path(__file__).read_text()\nK = 1\ndef udf(b):\n    exec(TEXT)\n", "K = 1\n", "K = 2\n"),
    _kept("eval: not hints that are no expressions", "from typing import Literal\nOTHER = 1\ndef udf(b, kind: Literal['return', 'yield', 'a = 1', 'import x'] = 'return'):\n    return b\n", "= 1\n", "= 2\n"),
    replace(_kept("eval: a name that is not read", "K = 1\nL = 1\ndef udf(b):\n    return eval('L')\n", "K = 1\n", "K = 2\n"), needless=True),
    replace(_kept("eval: with its own names", "K = 1\ndef udf(b):\n    return eval(b, {'x': 1})\n", "K = 1\n", "K = 2\n"), needless=True),
    _kept("eval: of a model", "K = 1\ndef udf(b):\n    return b.eval()\n", "K = 1\n", "K = 2\n"),
    _kept("eval: re.compile", "import re\nK = 1\ndef udf(b):\n    return re.compile(b)\n", "K = 1\n", "K = 2\n"),
]  # fmt: skip

# Docstrings, hints and local names count, also where nothing reads them.
_MODULES = ("syntax: docstring: module", "syntax: docstring: helper module")
TEXTS = [
    replace(edit, needless=not edit.changes and edit.name not in _MODULES)
    for edit in (*DOCSTRINGS, *HINTS, *LOCALS)
]

EDITS = [*FACTORIES, *TEXTS, *IMPORTS, *EVALUATED]
