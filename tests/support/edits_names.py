"""Edits of a helper module of which the UDF names one definition, by how it is named."""

# ruff: noqa: E501  # one edit a line

from __future__ import annotations

from collections.abc import Mapping

from support.edits import Edit

HELPERS = "LIMIT = 1\n\n\ndef double(b):\n    return b * LIMIT\n\n\ndef other(b):\n    return -b\n"
EDITS: list[Edit] = []


def _edit(
    name: str, defs: str, changes: bool = True, edited: str = "LIMIT = 1", **files: str
) -> None:
    found: Mapping[str, str] = {"defs.py": defs, "helpers.py": HELPERS} | {
        f"{key.replace('__in__', '/')}.py": text for key, text in files.items()
    }
    file = next(
        key for key in (*(f for f in found if f != "defs.py"), "defs.py") if edited in found[key]
    )
    new = edited.replace("1", "2").replace("-b", "+b")
    EDITS.append(Edit(f"names: {name}", found, file, edited, new, changes))


_UDF = "def udf(b):\n    return "
_USES = {
    "taken by name": f"from helpers import double\n{_UDF}double(b)\n",
    "under another name": f"from helpers import double as d\n{_UDF}d(b)\n",
    "dotted": f"import helpers\n{_UDF}helpers.double(b)\n",
    "dotted under another name": f"import helpers as h\n{_UDF}h.double(b)\n",
    "in a hint and a default": "import helpers\ndef udf(b, f=helpers.double):\n    return f(b)\n",
}  # fmt: skip
for _name, _defs in _USES.items():
    _edit(_name, _defs)
    _edit(f"{_name}, another definition", _defs, False, "return -b")

_WHOLE = {
    "in eval": f"import helpers\n{_UDF}eval('helpers.double(b)')\n",
    "a module is passed on": f"import helpers\n{_UDF}run(helpers, b)\ndef run(m, b):\n    return m.other(b)\n",
    "getattr of a computed name": f"import helpers\n{_UDF}getattr(helpers, 'oth' + 'er')(b)\n",
    "sys.modules": f"import helpers, sys\n{_UDF}sys.modules['helpers'].other(b)\n",
    "inspect.getmodule": f"import helpers, inspect\n{_UDF}inspect.getmodule(helpers.double).other(b)\n",
    "a function's __globals__": f"import helpers\n{_UDF}helpers.double.__globals__['other'](b)\n",
    "an import in a function": "def udf(b):\n    import helpers\n    return helpers.other(b)\n",
    "an import of one of two": "try:\n    import missing_here as h\nexcept ImportError:\n    import helpers as h\ndef udf(b):\n    return h.other(b)\n",
    "a module's attribute is a module": (f"import between\n{_UDF}between.helpers.other(b)\n", "import helpers\n"),
    "a module taken from a module": (f"from between import helpers\n{_UDF}helpers.other(b)\n", "import helpers\n"),
    "a name that passes through": (f"from between import other\n{_UDF}other(b)\n", "from helpers import other\n"),
    "a name that a star passes on": (f"from between import other\n{_UDF}other(b)\n", "from helpers import *\n"),
    "a module's __getattr__": (f"import between\n{_UDF}between.anything(b)\n", "import helpers\ndef __getattr__(name):\n    return helpers.other\n"),
    "a name that another module sets": (f"import between, helpers\n{_UDF}helpers.double(b)\n", "import helpers\nhelpers.double = helpers.other\n"),
    "a module that replaces itself": (f"import between\n{_UDF}between.f(b)\n", "import helpers, sys\nclass M:\n    f = staticmethod(helpers.other)\nsys.modules[__name__] = M\n"),
    "a closure": "import helpers\ndef make(m):\n    def udf(b):\n        return m.other(b)\n    return udf\nudf = make(helpers)\n",
}  # fmt: skip
for _name, _given in _WHOLE.items():
    _defs, _between = (_given, "") if isinstance(_given, str) else _given
    _edit(_name, _defs, True, "return -b", between=_between)

_edit(
    "a package's name hides its module",
    f"import pkg\n{_UDF}pkg.part(b)\n", True, "return -b",
    pkg__in____init__="from pkg.part import part\n", pkg__in__part="from helpers import other as part\n",
)  # fmt: skip
_edit(
    "a package's function in place of its module",
    f"import pkg\nimport pkg.part\n{_UDF}pkg.part(b)\n", True, "return -b",
    pkg__in__part="", pkg__in____init__="from pkg import part\nfrom helpers import other as part\n",
)  # fmt: skip
_edit(
    "a module that a package's __init__ imports",
    f"import pkg\n{_UDF}pkg.part.f(b)\n", True, "return -b",
    pkg__in____init__="from . import part\n", pkg__in__part="from helpers import other as f\n",
)  # fmt: skip
_ORDER = "A = 1\nB = A\nA = 3\n"
EDITS += [
    Edit(
        f"names: the order of assignments, {where}",
        {"defs.py": defs, "helpers.py": _ORDER},
        file, "B = A\nA = 3\n", "A = 3\nB = A\n", True,
    )
    for where, file, defs in [
        ("in a helper", "helpers.py", f"from helpers import B\n{_UDF}B\n"),
        ("in the file itself", "defs.py", f"{_ORDER}{_UDF}B\n"),
    ]
]  # fmt: skip
EDITS.append(
    Edit(
        "names: the order of definitions",
        {
            "defs.py": f"from helpers import g\n{_UDF}g()\n",
            "helpers.py": "def f():\n    return 1\ng = f\ndef f():\n    return 2\n",
        },
        "helpers.py", "g = f\ndef f():\n    return 2\n", "def f():\n    return 2\ng = f\n", True,
    )
)  # fmt: skip
