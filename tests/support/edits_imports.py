"""Edits of code that runs during imports, apart from the values that the UDF itself reads."""

# projects of a few lines each

from __future__ import annotations

from support.edits import Edit

EDITS: list[Edit] = []

# The base of most projects: code that reads a registry, and a module of plugins.
REGISTRY = (
    "REGISTRY = {}\n"
    "SEEN = []\n"
    "def register(function):\n    REGISTRY[function.__name__] = function\n    return function\n"
    "def named(name):\n"
    "    def keep(function):\n        REGISTRY[name] = function\n        return function\n"
    "    return keep\n"
    "class Base:\n"
    "    def __init_subclass__(cls, **options):\n        REGISTRY[cls.__name__] = cls\n"
)
READER = "import plugins\nimport registry\ndef udf(b):\n    return registry.REGISTRY['clean'](b)\n"
SETTINGS = "K = 1\nclass Settings:\n    k = 1\n    mode = 'a'\nsettings = Settings()\n"


def edit(
    name: str,
    old: str = "1",
    new: str = "2",
    *,
    file: str = "plugins.py",
    changes: bool = True,
    needless: bool = False,
    **files: str,
) -> None:
    """Add an edit; `pkg__sub` among the files is ``pkg/sub.py``, and `__init` an ``__init__``."""
    contents = {
        f"{key.replace('__', '/').replace('/init', '/__init__')}.py": text
        for key, text in files.items()
    }
    EDITS.append(Edit(f"import: {name}", contents, file, old, new, changes, needless))


def plugin(name: str, text: str, old: str = "1", new: str = "2", **options: bool) -> None:
    """Add an edit of ``plugins.py`` beside a reader of a registry."""
    edit(name, old, new, defs=READER, registry=REGISTRY, plugins=text, **options)


def beside(name: str, text: str, **options: bool) -> None:
    """Add an edit of ``plugins.py``, which the UDF's module imports and does not read.

    A function imports it, so that no test executes the module.
    """
    defs = (
        "import settings\nfrom model import Model\ndef never():\n    import plugins\ndef udf(b):\n"
        "    return Model()(b), settings.K, settings.settings.k, len(b)\n"
    )
    model = "class Model:\n    size = 3\n    def __call__(self, b):\n        return b * self.size\n"
    edit(name, defs=defs, settings=SETTINGS, model=model, plugins=text, **options)


def inside(name: str, text: str, old: str = "1", new: str = "2", **options: bool) -> None:
    """Add an edit of ``defs.py`` itself."""
    edit(f"{name}, in the file itself", old, new, file="defs.py", defs=text, **options)


# An imported module registers into another module's object.
plugin(
    "a decorator registers",
    "import registry\n@registry.register\ndef clean(b):\n    return b + 1\n",
)
_PARTIAL = "import functools\nimport registry\ndef clean(b):\n    return b + 1\n"
plugin(
    "a partial only holds a function",
    _PARTIAL + "held = functools.partial(clean, registry.REGISTRY)\n",
    changes=False,
)
plugin(
    "a builtin calls a function",
    "from registry import REGISTRY\n"
    "def clean(b):\n    return REGISTRY.setdefault('clean', abs) and 1\n"
    "found = sorted([0], key=clean)\n",
)
plugin(
    "a parser calls a method of a class",
    "import json\nfrom registry import REGISTRY\nclass Decoder(json.JSONDecoder):\n"
    "    def decode(self, text):\n        REGISTRY['clean'] = lambda b: b + 1\n"
    "found = json.loads('0', cls=Decoder)\n",
)
plugin(
    "a parser calls a function of a dict",
    "import json\nfrom registry import REGISTRY\n"
    "def keep(pairs):\n    REGISTRY['clean'] = lambda b: b + 1\nHOOKS = {'hook': keep}\n"
    "found = json.loads('{}', object_hook=HOOKS['hook'])\n",
)
_HOOK = "def hook(v):\n    REGISTRY['clean'] = lambda b: b + len(v)\n    return v\n"
_WRAPPED = (
    "def wrap(*_):\n    return hook\nimport dataclasses\nimport vane_dagster as vd\n"
    "{}class Own:\n    n: int = 2\n    def __call__(self, b: str) -> str:\n        return b\n"
)
_CONFIG = (
    "import dagster as dg\nfrom typing import Annotated\nfrom pydantic import AfterValidator\n"
    "Text = Annotated[str, AfterValidator(hook)]\nclass Own(dg.Config):\n    n: "
)
for before, statement in [
    ("", "sorted(['1'], key=make())"),
    ("class Own:\n    __call__ = staticmethod(hook)\n", "sorted(['1'], key=Own())"),
    ("HOOKS = {}\ndef known(f):\n    HOOKS['h'] = f\nknown(hook)\n", "max(['1'], key=HOOKS['h'])"),
    (
        "HOOK = None\ndef use(f):\n    global HOOK\n    HOOK = f\nuse(hook)\n",
        "max(['1'], key=HOOK)",
    ),
    ("try:\n    from hooks import hook\nexcept ImportError:\n    pass\n", "max(['1'], key=hook)"),
    (
        "DATA = None\ndef use():\n    global DATA\n    DATA = dict(put=hook)\nuse()\n",
        "DATA['put']('1')",
    ),
    ("from re import sub\n", "sub('.', lambda m: hook(m[0]), '1')"),
    ("import re\n", "re.compile('.').sub(lambda m: hook(m[0]), '1')"),
    ("", "[max(['1'], key=h) for h in [hook]]"),
    ("", "json.loads('{\"1\": 3}', object_hook=REGISTRY.update)"),
    (_WRAPPED.format("@functools.partial(wrap, 3)\n"), "Own('1')"),
    (_WRAPPED.format("@wrap\n@vd.cls\n"), "Own('1')"),
    (_CONFIG + "Text\n", "Own(n='1')"),
    (_CONFIG + "Annotated[str, AfterValidator(hook)]\n", "Own(n='1')"),
    ("", "h = hook\n    found = max(['1'], key=h)"),
    ("", "h = []\n    h.append(hook)\n    found = max(['1'], key=h[0])"),
    ("", "h = {}\n    h['a'] = hook\n    found = max(['1'], key=h['a'])"),
    ("", "for h in [hook]:\n        found = max(['1'], key=h)"),
    ("", "found = max(['1'], key=given)"),
    ("", "found = max(['1'], key=more[0])"),
    ("", "found = json.loads('{\"1\": 3}', object_hook=registry.update)"),
]:
    head = f"import functools, json\nfrom registry import REGISTRY\n{_HOOK}{before}"
    plugin(
        f"{statement!r} calls what it gets, in a factory, after {before!r}",
        f"{head}def make():\n    return hook\ndef build(registry, given, *more):\n"
        f"    {statement}\nbuild(REGISTRY, hook, hook)\n",
        "'1'" if "'1'" in statement else '"1"',
        "'12'" if "'1'" in statement else '"12"',
    )
    if "    " not in statement and not statement.startswith("found"):
        plugin(
            f"{statement!r} calls what it gets, after {before!r}",
            f"{head}def make():\n    return hook\nfound = {statement}\n",
            "'1'" if "'1'" in statement else '"1"',
            "'12'" if "'1'" in statement else '"12"',
        )
plugin(
    "a parser calls a default of a factory",
    f"from registry import REGISTRY\n{_HOOK}def build(hook=hook):\n"
    "    found = max(['1'], key=hook)\nbuild()\n",
    "'1'",
    "'12'",
)
inside(
    "a class under vd.cls is only held",
    "import vane_dagster as vd\nROOT = 'a'\nPATH = ROOT + '/1'\n@vd.cls\nclass udf:\n"
    "    def __init__(self, path):\n        self.path = path\n"
    "    def __call__(self, b: int) -> int:\n        return b\nmodel = udf(PATH)\n",
    changes=False,
)
plugin(
    "registered under a condition",
    "import os, registry\nif os.name == 'posix1':\n"
    "    registry.REGISTRY['clean'] = lambda b: b\nelse:\n"
    "    registry.REGISTRY['clean'] = abs\n",
    "posix1",
    "posix",
)
plugin(
    "a subclass registers itself",
    "from registry import Base\nclass clean(Base):\n    def __new__(cls, b):\n"
    "        return b + 1\n",
)
plugin(
    "the main guard",
    "import registry\nif __name__ == '__main__':\n    registry.REGISTRY['clean'] = 1\n",
    changes=False,
)

# The same through the `__init__` of packages, and one step further.
edit(
    "a package's __init__ registers",
    file="pkg/__init__.py",
    defs="from pkg.tools import K\nimport registry\ndef udf(b):\n"
    "    return registry.REGISTRY['clean'](b) + K\n",
    registry=REGISTRY,
    pkg__init="import registry\nregistry.REGISTRY['clean'] = lambda b: b + 1\n",
    pkg__tools="K = 3\n",
)
edit(
    "the order of two imports that register the same",
    "import one\nimport two\n",
    "import two\nimport one\n",
    file="defs.py",
    defs="import one\nimport two\nimport registry\ndef udf(b):\n"
    "    return registry.REGISTRY['clean'](b)\n",
    registry=REGISTRY,
    one="import registry\nregistry.REGISTRY['clean'] = lambda b: b + 1\n",
    two="import registry\nregistry.REGISTRY['clean'] = lambda b: b + 2\n",
)

# An imported module changes classes, settings and modules.
beside("a method of a class is replaced", "import model\nmodel.Model.__call__ = lambda s, b: 1\n")
beside("a library's function is replaced", "import json\njson.loads = lambda text: 1\n")
beside(
    "the context of decimals is set",
    "import decimal\ncontext = decimal.getcontext()\ncontext.prec = 1\n",
)
plugin(
    "a validator of settings registers",
    "import pydantic_settings, pydantic\nfrom registry import REGISTRY\n"
    "class Settings(pydantic_settings.BaseSettings):\n    k: int = 1\n"
    "    @pydantic.model_validator(mode='after')\n    def keep(self):\n"
    "        REGISTRY['clean'] = lambda b: b + self.k\n        return self\n"
    "settings = Settings()\n",
)
for base in ("ABC", "object"):
    plugin(
        f"a subclass of a class of {base} registers itself",
        "from abc import ABC\nfrom registry import REGISTRY\n"
        f"class Base({base}):\n    def __init_subclass__(cls, **kw):\n"
        "        super().__init_subclass__(**kw)\n        REGISTRY[cls.__name__] = cls\n"
        "class clean(Base):\n    def __new__(cls, b):\n        return b + 1\n",
    )
beside("a file is written", "open('there.txt', 'w').write('1')\n")
beside(
    "what makes values",
    "import dataclasses, enum, functools, os, re\nfrom pathlib import Path\n"
    "from typing import NamedTuple, TypeVar\nimport jax, pyarrow as pa, pydantic, ray, torch\n"
    "from numba import njit\nfrom tenacity import retry\n"
    "K = 1\nNAMES = ['a', K]\nP = re.compile('1')\nQ = P.sub('a', 'b')\n"
    "T1 = TypeVar('T1')\nX: dict[str, T1] = {}\n"
    "ROOT = Path('1').absolute()\nHOME = os.environ.get('HOME1')\n"
    "PLACE = os.environ['PATH'] + '1'\n"
    "TABLE = pa.table({'a': [1]})\nCOLUMNS = TABLE.column_names\n"
    "@dataclasses.dataclass\nclass Hit:\n    x: int = 1\n"
    "class Color(enum.Enum):\n    RED = 1\nclass Row(pydantic.BaseModel):\n    x: int = 1\n"
    "class Pair(NamedTuple):\n    x: int = 1\n"
    "@functools.lru_cache(maxsize=1)\ndef f():\n    return 1\n@njit\ndef a():\n    return 1\n"
    "@jax.jit\ndef b():\n    return 1\n@ray.remote\ndef c():\n    return 1\n"
    "@retry(reraise=True)\ndef d():\n    return 1\n"
    "class Other:\n    @torch.no_grad()\n    def f(self):\n        return 1\n"
    "def g():\n    return 1\n"
    "FUNCTIONS = {'g': g, **{n: g for n in 'ab'}}\nFUNCTIONS['h'] = g\n"
    "class Thing:\n    def __init__(self, k):\n        self.all = []\n        self.all.append(k)\n"
    "thing = Thing(1)\nthing.k = 1\n"
    "from abc import ABC, abstractmethod\nfrom decimal import Decimal\nimport json, yaml\n"
    "from pydantic_settings import BaseSettings\nVAT = Decimal('0.1')\n"
    "class Base(ABC):\n    def __init_subclass__(cls, name, **kw):\n"
    "        super().__init_subclass__(**kw)\n        cls.name = name\n"
    "    @abstractmethod\n    def run(self): ...\n"
    "class Derived(Base, name='1'):\n    def run(self):\n        return VAT\n"
    "class Settings(BaseSettings):\n    k: int = 1\nDEFAULTS, ROW = Settings(k=1), Row(x=1)\n"
    "FILE = ROOT / 'a1' / 'b.yaml'\nVALUES = yaml.safe_load(FILE.read_text())\n"
    "def read(path):\n    with open(path) as file:\n        return json.load(file)\n"
    "READ = read(FILE), (ROOT / 'c1').exists()\n",
    changes=False,
)
beside(
    "declarations, logging and warnings",
    "import dagster as dg, logging, pytest, typer, warnings\nfrom model import Model\n"
    "log = logging.getLogger('1')\nlog.setLevel(1)\nlogging.basicConfig(level=1)\n"
    "warnings.filterwarnings('ignore', message='1')\nprint(1)\n"
    "@dg.asset(group_name='g1')\ndef table():\n    return 1\n"
    "job = dg.define_asset_job('job1')\ndefs = dg.Definitions(jobs=[job])\n"
    "app = typer.Typer()\n@app.command()\ndef main():\n    print(Model.size, 1)\n"
    "@pytest.fixture\ndef x():\n    return 1\n",
    changes=False,
)
beside(
    "a pipeline with the class as a stage",
    "import vane_dagster as vd\nfrom model import Model\n"
    "docs = vd.Pipeline('docs1', source=vd.parquet('a'), id='id')\n"
    "done = docs.map_batches('x', Model, schema={'a': 'INT'})\ndone.write('out', '/tmp/1')\n",
    changes=False,
)

for assets in (
    "assets = [p.build_assets() for p in (docs, pages)]",
    "assets = []\nfor p in (docs, pages):\n    assets.append(p.build_assets())",
    "assets = list(map(vd.Pipeline.build_assets, [docs, pages]))",
    "def built(p):\n    return p.build_assets()\nassets = [built(docs), built(pages)]",
):
    inside(
        f"a function of another pipeline, beside {assets!r}",
        "import vane_dagster as vd\ndef udf(b):\n    return b\ndef other(b):\n    return 1\n"
        "docs = vd.Pipeline('docs', source=vd.parquet('a'), id='id')\n"
        "pages = vd.Pipeline('pages', source=vd.parquet('b'), id='id')\n"
        "docs.map_batches('x', udf, schema={'a': 'INT'})\n"
        f"pages.map_batches('x', other, schema={{'a': 'INT'}})\n{assets}\n",
        "return 1",
        "return 2",
        changes=False,
    )

_FACTORY = (
    "import logging\nimport dagster as dg\nimport vane_dagster as vd\nREG = []\n"
    "def udf(b):\n    return b, REG\n"
    "def other(b):\n    return 1\ndef fill(r):\n    r.append(1)\n"
    "def docs(folder, r=()):\n    docs = vd.Pipeline('docs', source=vd.parquet('a'), id='id')\n"
    "    done = docs.map_batches('x', udf, schema={{'y': 'INT'}}, concurrency=1)\n"
    "    for name in 'ab':\n"
    "        docs.map(name, other, schema='INT')\n    done.write('out', folder)\n"
    "{within}    return docs\n{call}\n"
)
for within, call, old, new, changes in [
    ("", "@dg.definitions\ndef defs():\n    return docs('a')", "rency=1", "rency=2", False),
    ("", "assets = [docs('a').build_assets()]", "return 1", "return 2", False),
    ("", "assets = [docs('a').build_assets()]", "concurrency=1", "concurrency=2", False),
    ("    print(folder, 1)\n", "d = docs('a')\nd.project('c', ['x'])", "der, 1", "der, 2", False),
    ("    sorted(folder)\n", "docs('a')", "concurrency=1", "concurrency=2", None),
    ("    REG.append(1)\n", "docs('a')", "append(1)\n    return", "append(2)\n    return", True),
    ("    r = REG\n    r.append(1)\n", "docs('a')", "d(1)\n    return", "d(2)\n    return", True),
    ("    r.append(1)\n", "docs('a', REG)", "append(1)\n    return", "append(2)\n    return", True),
    (
        "    for r in [REG]:\n        r.append(1)\n",
        "docs('a')",
        "nd(1)\n    ret",
        "nd(2)\n    ret",
        True,
    ),
    ("    fill(REG)\n", "docs('a')", "r.append(1)", "r.append(2)", True),
    ("    def fill():\n        REG.append(3)\n    fill()\n", "docs('a')", "(3)", "(4)", True),
    ("    logging = REG\n    logging.append(3)\n", "docs('a')", "(3)", "(4)", True),
    ("    udf.k = 3\n", "docs('a')", "k = 3", "k = 4", True),
    ("    f = udf\n    f.k = 3\n", "docs('a')", "k = 3", "k = 4", True),
    ("", "docs('a')\nf = udf\nf.k = 3", "k = 3", "k = 4", True),
    ("    return udf\n", "docs('a').k = 3", "k = 3", "k = 4", True),
    ("    global REG\n    REG = [3]\n", "docs('a')", "[3]", "[4]", True),
    (
        "    from operator import iadd as logging\n    logging(REG, [3])\n",
        "docs('a')",
        "[3]",
        "[4]",
        True,
    ),
]:
    inside(
        f"a function that makes a pipeline, with {within!r}, called by {call!r}: {old!r}",
        _FACTORY.format(within=within, call=call), old, new, changes=bool(changes),
        needless=changes is None,
    )  # fmt: skip

_DECLARED = """import dataclasses
import os
from pathlib import Path
import vane_dagster as vd
LABELS = ["a", "b"]
ROOT = Path(__file__).parent
@dataclasses.dataclass(frozen=True)
class Own(vd.checks.Check):
    n: int
    def evaluate(self, context):
        return True
@vd.cls
class Model:
    def __call__(self, b):
        return LABELS
def add(p):
    return p.map("added", udf, schema="INT")
def udf(b):
    return Model()(b), LABELS
def build(folder, model="m"):
    p = vd.Pipeline("docs", source=vd.parquet(f"{{folder}}/a"), id="id")
    a = p.map_batches("x", udf, schema={{"y": "INT"}}, batch_size=16)
    {within}
    return p
{call}
"""
for within, call, needless in [
    ('p.map("c", udf, schema="INT", asset=vd.Asset(checks=[Own(1)]))', 'p = build("d")', False),
    ('p.map("c", Model(), schema="INT", concurrency=1)', 'p = build("d")', False),
    (
        'p.prompt("c", "{x}", provider="openai", model=os.environ.get("M", model))',
        'p = build("d", os.environ.get("M", "m"))',
        False,
    ),
    (
        'p.classify("c", "x", labels=LABELS, provider="openai", model="m")',
        'p = build(ROOT / "c")',
        False,
    ),
    ("return p, a", 'p, a = build("d")\nb = p.build_assets()', False),
    ('if not folder: raise ValueError(f"no {folder}")', 'p = build("d")', False),
    ("b = add(p)", 'p = build("d")\nassets = [p.build_assets()]', True),
    ("c = sorted(LABELS)", 'p = build("d")', True),
]:
    inside(
        f"a function that declares, with {within!r}, called by {call!r}",
        _DECLARED.format(within=within, call=call),
        "batch_size=16",
        "batch_size=32",
        changes=False,
        needless=needless,
    )
edit(
    "a function of another file that declares",
    "batch_size=16",
    "batch_size=32",
    file="make.py",
    changes=False,
    defs="from make import build\ndef udf(b):\n    return 1\np = build(udf)\np.build_assets()\n",
    make=(
        "import vane_dagster as vd\ndef build(udf):\n"
        "    p = vd.Pipeline('docs', source=vd.parquet('a'), id='id')\n"
        "    p.map_batches('x', udf, schema={'y': 'INT'}, batch_size=16)\n    return p\n"
    ),
)
edit(
    "a file that declares what another one defines",
    "batch_size=16",
    "batch_size=32",
    file="make.py",
    changes=False,
    defs="def udf(b):\n    return 1\n",
    make=(
        "import vane_dagster as vd\nfrom defs import udf\ndef build():\n"
        "    p = vd.Pipeline('docs', source=vd.parquet('a'), id='id')\n"
        "    p.map_batches('x', udf, schema={'y': 'INT'}, batch_size=16)\n    return p\n"
        "p = build()\n"
    ),
)
inside(
    "two records of one class",
    "import dataclasses\n@dataclasses.dataclass\nclass Options:\n    n: int = 1\n"
    "    def twice(self):\n        return 2 * self.n\n"
    "A = Options(n=3)\nB = Options(n=4)\ndef udf(b):\n    return A.twice()\n",
    "n=4",
    "n=5",
    changes=False,
)

# A lambda among the arguments of a declaration stands for itself.
_LAMBDA = """import vane_dagster as vd
K = 1
p = vd.Pipeline("docs", source=vd.parquet("a"), id="id")
p.map("first", lambda text: len(text), schema={"y": "INT"}, concurrency=1)
p.map("b", lambda text: len(text) + K, schema={"y": "INT"}).map("c", lambda y: y, schema="INT")
udf = p["b"].spec.udf.target
if __name__ == "__main__":
    p.run(partitions="a")
"""
for old, new, changes in [
    ("concurrency=1", "concurrency=2", False),
    ('parquet("a")', 'parquet("b")', False),
    ("lambda text: len(text), ", "lambda text: 2, ", False),
    ("lambda y: y", "lambda y: 3", False),
    ('partitions="a"', 'partitions="b"', False),
    ("len(text) + K", "len(text) - K", True),
    ("K = 1", "K = 2", True),
]:
    inside(f"beside a lambda: {old}", _LAMBDA, old, new, changes=changes)
inside(
    "a lambda in a comprehension",
    "def made(*given, key):\n    return given\nudf = made([lambda x, k=k: k for k in (1, 3)], "
    "key=lambda y: y)[0][0]\n",
    "(1, 3)",
    "(2, 3)",
)
inside(
    "lambdas of the same line",
    "def two(*given):\n    return given[-1]\nudf = two(lambda *a: len(a), lambda **a: len(a))\n",
    "**a",
    "*a",
)
inside(
    "the device of another model",
    "import torch\nDEVICE = 'cuda:1' if torch.cuda.is_available() else 'cpu'\n"
    "def udf(b):\n    return torch.ones(1)\n",
    "cuda:1",
    "cuda:2",
    changes=False,
)
# A path in code that an import does not execute.
inside(
    "the main guard of a decorated class",
    "import torch\ndef build():\n    return 3\nclass udf:\n    @torch.inference_mode()\n"
    "    def __call__(self, b):\n        return build()\n"
    "if __name__ == '__main__':\n    torch.save(build(), 'w1.pt')\n",
    "w1.pt",
    "w2.pt",
    changes=False,
)

# The importing module itself changes what it imports, or its own names.
inside(
    "a call that fills a dict",
    "C = {}\ndef fill(d, k):\n    d['k'] = k\nfill(C, 1)\ndef udf(b):\n    return C\n",
)
inside(
    "singledispatch",
    "import functools\n@functools.singledispatch\ndef f(x):\n    return 0\n"
    "@f.register(str)\ndef _(x):\n    return 1\ndef udf(b):\n    return f(b)\n",
)
inside(
    "another plugin of the same decorator",
    "R = {}\ndef register(f):\n    if f.__name__ in R:\n        raise KeyError\n"
    "    R[f.__name__] = f\n    return f\n@register\ndef other(b):\n"
    "    return 1\n@register\ndef udf(b):\n    return b\n",
    changes=False,
    needless=True,
)
inside(
    "the order of two functions",
    "K = 1\ndef one(d):\n    return 3\ndef two(d):\n    return one(d)\ndef udf(b):\n"
    "    return two(b)\n",
    "def one(d):\n    return 3\ndef two(d):\n    return one(d)\n",
    "def two(d):\n    return one(d)\ndef one(d):\n    return 3\n",
    changes=False,
)

# More ways to write the same.
edit(
    "a module of a folder in a folder, neither with an __init__",
    file="outer/inner/part.py",
    defs="def udf(b):\n    import outer.inner.part as part\n    return part.K\n",
    outer__inner__part="K = 1\n",
)

# Packages' own files.
edit(
    "a module that puts an object in its place",
    file="settings.py",
    defs="import settings\ndef udf(b):\n    return settings.K\n",
    settings="import sys\nclass Settings:\n    K = 1\nsys.modules[__name__] = Settings()\n",
)


# Known limits: the results cannot change.
edit(
    "a constant of a file that is imported under a condition",
    defs="if 1:\n    import plugins\ndef udf(b):\n    return b\n",
    plugins="K = 1\n",
    needless=True,
    changes=False,
)
