"""Edits of a definition that a UDF reaches through other modules, or looks up at run time."""

# ruff: noqa: E501  # one edit a line

from __future__ import annotations

from support.edits import Edit

_UDF = "def udf(b):\n    return "
HELPERS = "LIMIT = 1\ndef double(b):\n    return b * LIMIT\ndef other(b):\n    return -b\n"
PROJECTS: list[tuple[str, dict[str, str]]] = [
    (
        "inspect.getmodule",
        {"defs.py": f"import helpers, inspect\n{_UDF}inspect.getmodule(helpers.double).other(b)\n"},
    ),
    (
        "import_module of __module__",
        {
            "defs.py": f"import helpers, importlib\n{_UDF}importlib.import_module(helpers.double.__module__).other(b)\n"
        },
    ),
    (
        "attrgetter",
        {
            "defs.py": f"import helpers, operator\n{_UDF}operator.attrgetter('helpers.other')(globals_())(b)\ndef globals_():\n    import defs\n    return defs\n"
        },
    ),
    ("module __dict__", {"defs.py": f"import helpers\n{_UDF}helpers.__dict__['other'](b)\n"}),
    (
        "dir loop",
        {
            "defs.py": f"import helpers\nF = [getattr(helpers, n) for n in dir(helpers) if n == 'other']\n{_UDF}F[0](b)\n"
        },
    ),
    (
        "from pkg import star all",
        {
            "defs.py": f"from pkg import *\n{_UDF}other(b)\n",
            "pkg/__init__.py": "from helpers import *\n__all__ = ['other']\n",
        },
    ),
    (
        "reexport dotted",
        {
            "defs.py": f"import pkg\n{_UDF}pkg.h.other(b)\n",
            "pkg/__init__.py": "import helpers as h\n",
        },
    ),
    (
        "reexport in sub",
        {
            "defs.py": f"import pkg.sub as s\n{_UDF}s.h.other(b)\n",
            "pkg/__init__.py": "",
            "pkg/sub.py": "import helpers as h\n",
        },
    ),
    (
        "lazy getattr package",
        {
            "defs.py": f"import pkg\n{_UDF}pkg.thing(b)\n",
            "pkg/__init__.py": "import importlib\ndef __getattr__(n):\n    return importlib.import_module('helpers').other\n",
        },
    ),
    (
        "class attr",
        {
            "defs.py": f"import helpers\nclass A:\n    f = staticmethod(helpers.other)\n{_UDF}A.f(b)\n"
        },
    ),
    ("walrus", {"defs.py": f"import helpers\n{_UDF}(h := helpers).other(b)\n"}),
    ("lambda default", {"defs.py": "import helpers\nudf = lambda b, h=helpers: h.other(b)\n"}),
    ("partial", {"defs.py": "import helpers, functools\nudf = functools.partial(helpers.other)\n"}),
    (
        "closure",
        {
            "defs.py": "import helpers\ndef make(m):\n    def udf(b):\n        return m.other(b)\n    return udf\nudf = make(helpers)\n"
        },
    ),
    (
        "nested udf",
        {
            "defs.py": "import helpers\ndef make():\n    def udf(b):\n        return helpers.other(b)\n    return udf\nudf = make()\n"
        },
    ),
    (
        "relative",
        {
            "defs.py": f"from pkg.a import run\n{_UDF}run(b)\n",
            "pkg/__init__.py": "",
            "pkg/a.py": "from . import b as bb\ndef run(x):\n    return bb.go(x)\n",
            "pkg/b.py": "import helpers\ngo = helpers.other\n",
        },
    ),
    (
        "setattr loop on helpers",
        {
            "defs.py": f"import plug, helpers\n{_UDF}helpers.double(b)\n",
            "plug.py": "import helpers\nfor n in ['double']:\n    setattr(helpers, n, helpers.other)\n",
        },
    ),
    (
        "mutable shared",
        {
            "defs.py": f"from reg import get\nimport plug\n{_UDF}get('x')(b)\n",
            "reg.py": "R = {}\ndef get(n):\n    return R[n]\n",
            "plug.py": "from reg import R\nimport helpers\nR['x'] = helpers.other\n",
        },
    ),
    (
        "init_subclass",
        {
            "defs.py": f"from reg import Base\nimport plug\n{_UDF}Base.subs[0](b)\n",
            "reg.py": "class Base:\n    subs = []\n    def __init_subclass__(cls):\n        Base.subs.append(cls.run)\n",
            "plug.py": "from reg import Base\nimport helpers\nclass X(Base):\n    run = staticmethod(helpers.other)\n",
        },
    ),
    (
        "helper own registry",
        {
            "defs.py": f"from reg import get\n{_UDF}get('x')(b)\n",
            "reg.py": "import helpers\nR = {}\ndef register(n):\n    def deco(f):\n        R[n] = f\n        return f\n    return deco\n@register('x')\ndef x(b):\n    return helpers.other(b)\ndef get(n):\n    return R[n]\n",
        },
    ),
    (
        "two aliases, one passed",
        {
            "defs.py": f"import helpers\nimport helpers as hh\n{_UDF}run(hh, helpers.double(b))\ndef run(m, b):\n    return m.other(b)\n"
        },
    ),
    (
        "del and rebind",
        {
            "defs.py": f"import plug\n{_UDF}plug.f(b)\n",
            "plug.py": "import helpers\nf = helpers.double\ndel f\nf = helpers.other\n",
        },
    ),
    (
        "from helpers import in try",
        {
            "defs.py": f"try:\n    from helpers import other as f\nexcept ImportError:\n    f = None\n{_UDF}f(b)\n"
        },
    ),
    (
        "match class",
        {
            "defs.py": "import helpers\ndef udf(b):\n    match b:\n        case helpers.LIMIT:\n            return 1\n    return helpers.other(b)\n"
        },
    ),
    (
        "global via update",
        {"defs.py": f"import helpers\nglobals().update(f=helpers.other)\n{_UDF}f(b)\n"},
    ),
    (
        "vars update from module",
        {"defs.py": f"import helpers\nglobals().update(vars(helpers))\n{_UDF}other(b)\n"},
    ),
    (
        "pickle by name",
        {
            "defs.py": f"import helpers, pickle\nD = pickle.dumps(helpers.other)\n{_UDF}pickle.loads(D)(b)\n"
        },
    ),
]
EDITS = [
    Edit(
        f"lookups: {name}", {"helpers.py": HELPERS} | files, "helpers.py", "return -b", "return +b"
    )
    for name, files in PROJECTS
]
