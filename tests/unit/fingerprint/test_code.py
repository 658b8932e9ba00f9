"""What changes the identity of a UDF, and what does not: on real files that are really edited."""

from __future__ import annotations

import ast
import builtins
import importlib
import itertools
import sys
import types
from pathlib import Path

import pytest

from support.cells import digests_of_cells
from support.code_project import defs, project  # noqa: F401  # fixtures
from support.edits import Project
from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import ast_digest, modules
from vane_dagster.fingerprint.code import CodeIdentity, code_identity
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.modules import files_read_once, path_kind
from vane_dagster.fingerprint.objects import value_digest


def test_the_parts_name_what_changed(project: Project) -> None:
    project.write(
        defs="import plugins\nfrom helpers import double\nK = 1\n"
        "def udf(b):\n    return double(b) * K\n",
        helpers="BY = {}\ndef double(b):\n    return b * BY['x']\n",
        plugins="from helpers import BY\nBY['x'] = 1\n",
    )
    before = {name: part for _, name, part in project.identity().parts}
    assert next(iter(before)) == "udf"
    for file, old, new, changed in [
        ("helpers.py", "b * BY", "BY", ["helpers.double"]),
        ("defs.py", "K = 1", "K = 2", ["K"]),
        ("defs.py", "double(b) *", "double(b) +", ["udf"]),
        ("plugins.py", "= 1", "= 2", ["plugins.BY"]),
    ]:
        project.edit(file, old, new)
        parts = {name: part for _, name, part in project.identity().parts}
        names = [name for name in parts if parts[name] != before.get(name)]
        assert [name for name in names if name in changed] == changed
        assert set(names) <= {*changed, "top-level statements"}
        before = parts


def test_modules_and_packages(defs: Project) -> None:
    found = defs.identity("Model")
    assert found.modules == ("deeper", "defs", "helpers", "lazy_helper", "unrelated")
    assert found.packages == ("numpy",)
    assert defs.identity("udf").packages == ("orjson_missing",)


def test_functions_of_one_statement_differ_and_count_with_it(project: Project) -> None:
    project.write(
        defs="def make(n):\n    def one(b):\n        return b * n\n    other = lambda b: b - n\n"
        "    class Two:\n        def __call__(self, b):\n            return other(b)\n"
        "    return one, other, Two, lambda b: b + n\n"
        "one, other, Two, last = make(2)\n"
        "up = lambda b: b + 1; down = lambda b: b - 1\n"
    )
    names = ["one", "other", "Two", "last", "up", "down"]
    before = {name: project.digest(name) for name in names}
    assert len(set(before.values())) == 6
    project.edit("defs.py", "b - n", "b / n")
    after = {name: project.digest(name) for name in names}
    assert [name for name in names if after[name] != before[name]] == names[:4]
    project.edit("defs.py", "def make", "# moved\nX = 1\ndef make")
    assert {name: project.digest(name) for name in names} == after
    project.edit("defs.py", "up = lambda b: b + 1; down =", "down = lambda b: b + 1; up =")
    assert project.digest("up") != after["up"]


@pytest.mark.parametrize("given", ["clean", "Model", "partial(clean, 1)", "Model()"])
def test_code_among_arguments_counts_with_what_the_file_of_the_stage_changes(
    project: Project, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write(
        core="from dataclasses import dataclass\nREG = {}\ndef clean(x): return REG['f'](x)\n"
        "@dataclass\nclass Model:\n    k: int = 1\n    def run(self, x): return clean(x)\n",
        plug="from core import REG\nREG['f'] = lambda x: x * 2\n",
        defs="from functools import partial\nimport plug\nfrom core import Model, clean\n"
        f"GIVEN = {given}\n",
    )
    files = LocalFiles(code=[str(project.root / "defs.py")])
    loaded = project.load("GIVEN")
    before = value_digest(loaded, files=files)
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["defs"])
    assert value_digest(loaded, files=files) == before, "an alias is no other module"
    project.edit("plug.py", "x * 2", "x * 3")
    assert value_digest(project.load("GIVEN"), files=files) != before


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "import importlib\ndef udf(b):\n    return importlib.import_module(b)\n",
            "line 3.*version=",
        ),
        ("def udf(b):\n    return __import__(b)\n", "line 2.*version="),
        (
            "import importlib as i\nP = 'pkg'\ndef udf(b): return i.import_module('.' + b, P)\n",
            "line 3.*version=",
        ),
        (
            "import loader\nloader.load('pkg.there')\ndef udf(b):\n    return b\n",
            "loader.py, line 2",
        ),
        ("def udf(b):\n    from pkg import gone\n", r"line 2.*'pkg\.gone' cannot be found"),
        ("def udf(b):\n    from . import gone\n", "line 2.*cannot be found"),
        ("def udf(b):\n    import broken\n", "broken.py, line 2"),
        (
            "import threading\ndef make(lock):\n    def inner(b):\n        return lock\n"
            "    return inner\nudf = make({'a': threading.Lock()})\n",
            r"inner\.__closure__\['lock'\]\['a'\] is a.*version=",
        ),
    ],
)
def test_what_cannot_be_resolved_asks_for_a_version(
    project: Project, text: str, match: str
) -> None:
    loader = "def load(name):\n    return __import__(name)\n"
    project.write(defs=text, pkg__in__there="", broken="x = 1\nx = = 2\n", loader=loader)
    with pytest.raises(CodeIdentityError, match=match):
        project.identity()
    assert project.identity(version="1").digest != project.identity(version="2").digest


def test_guarded_missing_module_is_no_error(project: Project) -> None:
    project.write(
        defs="import contextlib\ndef udf(b):\n    try:\n        from pkg import gone\n"
        "    except (ImportError, KeyError):\n        pass\n"
        "    with contextlib.suppress(ImportError):\n        import pkg.gone\n",
        pkg__in__there="",
    )
    assert project.identity().digest


def test_version_stands_for_the_code(defs: Project) -> None:
    before = defs.identity(version="1")
    assert before.modules == defs.identity().modules
    defs.edit("defs.py", "text[:LIMIT]", "text[LIMIT:]")
    assert defs.identity(version="1") == before
    assert defs.identity("Model", version="1").digest != before.digest


def test_installed_and_builtin_code_is_named_and_not_walked() -> None:
    assert code_identity(len).packages == ()
    found = code_identity(pytest.raises)
    assert found.packages[0] in ("_pytest", "pytest")
    assert found.modules == ()


def test_what_pip_put_into_a_target_folder_is_installed_and_own_code_beside_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("library/__init__.py", "library/inner/part.py", "single.py", "mine.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    record = tmp_path / "library-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("library/__init__.py,,\nlibrary/inner/part.py,,\nsingle.py,,\n../bin/x,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path_kind.cache_clear()
    modules._targets.cache_clear()

    names = ("library/inner/part.py", "library/inner/", "single.py", "mine.py", "library_own.py")
    kinds = [path_kind(str(tmp_path / name) + "/" * name.endswith("/")) for name in names]

    path_kind.cache_clear()
    modules._targets.cache_clear()
    assert kinds == ["installed", "installed", "installed", "own", "own"]


def test_an_installed_package_that_declares_a_pipeline_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declaration = (
        "import vane_dagster as vd\nfrom shop.models import score\n"
        "docs = vd.Pipeline('docs', source=vd.table([{'id': 1}]), id='id')\n"
        "docs.map_batches('scores', score, schema={'id': 'BIGINT'})\n"
    )

    def identity(folder: str, function: str) -> CodeIdentity:
        package = tmp_path / folder / "shop"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "models.py").write_text(function)
        (package / "defs.py").write_text(declaration)
        with monkeypatch.context() as loading:
            loading.syspath_prepend(tmp_path / folder)
            for name in ("shop", "shop.models", "shop.defs"):
                loading.delitem(sys.modules, name, raising=False)
            return code_identity(importlib.import_module("shop.defs").score)

    function = "def score(batch):\n    return batch\n"
    checkout, installed = (identity(each, function) for each in ("src", "a/site-packages"))
    edited = identity("b/site-packages", function.replace("return batch", "return batch[:1]"))
    assert checkout == installed
    assert installed.modules == ("shop", "shop.models")
    assert edited.digest != installed.digest


def test_nothing_of_the_user_is_run(project: Project) -> None:
    mark = project.root / "ran"
    project.write(
        defs="def udf(b):\n    import side.effect\n    from side import other\n    return b\n",
        side__in____init__=f"open({str(mark)!r}, 'w').close()\n",
        side__in__effect=f"open({str(mark)!r}, 'w').close()\n",
        side__in__other=f"open({str(mark)!r}, 'w').close()\n",
    )
    assert project.identity().modules == ("defs", "side", "side.effect", "side.other")
    assert not mark.exists()
    assert "side" not in sys.modules


def test_a_parser_that_fails_beside_another_thread_is_tried_again(monkeypatch):
    real, failures = ast.parse, iter([SystemError("AST constructor recursion depth mismatch")] * 2)

    def parse(source):
        for failure in failures:
            raise failure
        return real(source)

    monkeypatch.setattr(ast, "parse", parse)
    assert len(ast_digest.parse("x = 1\n").body) == 1
    failures = itertools.repeat(SystemError("always"))
    with pytest.raises(SystemError, match="always"):
        ast_digest.parse("x = 1\n")


def test_identities_of_one_reading_are_those_of_their_own(defs: Project) -> None:
    names = ["udf", "Model", "other"]
    alone = {name: defs.identity(name).parts for name in names}
    assert len(set(alone.values())) == len(names)
    for order in (names, names[::-1]):
        with files_read_once():
            assert {name: defs.identity(name).parts for name in order} == alone
    with files_read_once():
        defs.edit("deeper.py", "return x", "return -x")
        assert defs.identity("Model").parts != alone["Model"], "a reading ends with its block"
        defs.edit("deeper.py", "return -x", "return x")
        assert defs.identity("Model").parts != alone["Model"], "and lasts as long"
    assert defs.identity("Model").parts == alone["Model"]


def test_script_functions_are_found_by_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"

    def digest(text: str, edited: str | None = None) -> str:
        main = types.ModuleType("__main__")
        main.__file__ = str(script)
        monkeypatch.setitem(sys.modules, "__main__", main)
        script.write_text(text)
        exec(compile(text, str(script), "exec"), main.__dict__)
        script.write_text(edited or text)
        return code_identity(main.udf).digest  # type: ignore[attr-defined]  # made in memory

    body = "K = 1\ndef helper(b):\n    return b + K\ndef udf(b):\n    return helper(b)\n"
    negated = body.replace("return helper", "return -helper")
    assert digest("# moved\n\n" + body) == digest(body)
    assert digest(body.replace("K = 1", "K = 2")) != digest(body)
    for edited in (negated, body.replace("b + K", "b - K"), body.replace("K = 1", "K = 2")):
        assert digest(body, edited=edited) != digest(edited), "the script runs as it was"


def test_modules_that_functions_import_are_found_after_the_definitions_were_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later_made.py").write_text("K = 1\n")
    (tmp_path / "early_defs.py").write_text(
        "import vane_dagster as vd\n"
        "def f(x):\n    import later_made\n    return later_made.K\n"
        "p = vd.Pipeline('p', source=vd.table([{'x': 1}]), id='x')\np.map('a', f, schema='INT')\n"
    )
    with pytest.MonkeyPatch.context() as loading:  # as Dagster does
        loading.syspath_prepend(tmp_path)
        import early_defs  # type: ignore[import-not-found]  # just written
    monkeypatch.chdir("/")
    before = code_identity(early_defs.f)
    assert "later_made" in before.modules
    (tmp_path / "later_made.py").write_text("K = 2\n")
    assert code_identity(early_defs.f).digest != before.digest


def test_a_file_is_the_same_code_as_a_script_and_as_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "import argparse, logging, re\nlog = logging.getLogger()\nK, PATTERN = 1, re.compile('x')\n"
        "try:\n    import missing_one\nexcept ImportError:\n    missing_one = None\n"
        "TABLE = {}\nfor n in 'ab':\n    TABLE[n] = K\n"
        "def helper(b):\n    log.info('%s', b)\n    return PATTERN.sub('', TABLE['a'])\n"
        "class Model:\n    def __call__(self, b):\n"
        "        return missing_one or helper(b) or Model\n"
        "if __name__ == '__main__':\n    log.info(argparse.ArgumentParser().parse_args([]))\n"
    )
    (tmp_path / "both.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import both  # type: ignore[import-not-found]  # just written

    monkeypatch.setattr(sys, "argv", ["both.py"])
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "both.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(text, main.__file__, "exec"), main.__dict__)
    for name in ("helper", "Model"):
        assert (
            code_identity(getattr(main, name)).digest == code_identity(getattr(both, name)).digest
        )


@pytest.mark.parametrize(
    ("binds", "counts"),
    [
        ("A = int(sys.argv[1])", True),
        ("import argparse\nA = argparse.Namespace(n=sys.argv[1:])", True),
        ("A = 1\nif __name__ == '__main__':\n    A = int(sys.argv[1])", True),
        ("A = len(())\nif __name__ == '__main__':\n    A = int(sys.argv[1])", True),
        ("A = dict()\nif __name__ == '__main__':\n    A['n'] = int(sys.argv[1])", True),
        ("A = None\ndef main():\n    global A\n    A = int(sys.argv[1])\nmain()", True),
        ("def main():\n    global A\n    A = int(sys.argv[1])\nmain()", True),
        ("for A in range(int(sys.argv[1])): pass", True),
        ("A = 0\nA += int(sys.argv[1])", True),
        ("class A:\n    n = 1\nA.n = sys.argv[1]", True),
        ("class A:\n    n = 1\ndef main():\n    A.n = sys.argv[1]\nmain()", True),
        ("A = dict(n=1)\nA.update(n=sys.argv[1])", True),
        ("A = dict(n=1)\ndef main():\n    A['n'] = sys.argv[1]\nmain()", True),
        ("A = 2 * 3\ndef main():\n    global A\n    A = int(sys.argv[1])\nmain()", True),
        ("A = {'n': 1}\ndef main():\n    A['n'] = float(sys.argv[1]) - 1\nmain()", True),
        ("N = sys.argv[1]\ndef f():\n    return N\nA = [f]", True),
        ("f, g = abs, len\nA = f if sys.argv[1] == '2' else g", True),
        ("N = int(sys.argv[1])\nA = 1", False),
        (
            "B = 1\nC = 1\ndef A():\n    return B, C\ndef main():\n    global B, C\n"
            "    if sys.argv[1] == '2':\n        B = 2\n    else:\n        C = 2\nmain()",
            True,
        ),
        ("A = 1\nA = 2\nprint(sys.argv[1])", False),
        ("A = [sys.version]", False),
        ("A = {}\ndef main():\n    A['n'] = sys.argv[1]", False),
        ("A = dict(n=1)\ndef main():\n    A['n'] = sys.argv[1]", False),
        ("import logging\nA = logging.root\nif __name__ == '__main__':\n    A.debug('go')", False),
        (
            "import argparse\nP = argparse.ArgumentParser()\ndef keep(p):\n    return lambda f: f\n"
            "@keep(P)\ndef A(): pass",
            True,
        ),
        ("A = [sys.argv]\nA.append(A)", True),
        ("import threading\nA = [sys.argv, threading.Lock()]", True),
    ],
)
def test_values_of_scripts_count_if_the_run_determines_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, binds: str, counts: bool
) -> None:
    (tmp_path / "script.py").write_text(f"import sys\n{binds}\ndef udf(b):\n    return b, A\n")

    def digest(argument: str) -> str:
        monkeypatch.setattr(sys, "argv", ["script.py", argument])
        main = types.ModuleType("__main__")
        main.__file__ = str(tmp_path / "script.py")
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec(compile(Path(main.__file__).read_text(), main.__file__, "exec"), main.__dict__)
        return code_identity(main.udf).digest  # type: ignore[attr-defined]  # made in memory

    assert digest("2") == digest("2")
    assert (digest("2") != digest("3")) is counts


@pytest.mark.parametrize(
    "text",
    [
        "from values_made import Scaler\ndef udf(x):\n    return SCALER.scale(x)\n"
        "if __name__ == '__main__':\n    SCALER = Scaler()\n",
        "from values_made import Scaler\ndef udf(x):\n    return SCALER.scale(x)\n"
        "def main():\n    global SCALER\n    SCALER = Scaler()\nmain()\n",
        "import values_made\nT = {}\ndef udf(x):\n    return T['f'](x)\n"
        "if __name__ == '__main__':\n    T['f'] = values_made.Scaler.scale\n",
        "import importlib\ndef udf(x):\n    return made.Scaler().scale(x)\n"
        "if __name__ == '__main__':\n    made = importlib.import_module('values_made')\n",
    ],
)
def test_what_the_values_of_a_script_reach_counts(tmp_path, monkeypatch, text):
    (tmp_path / "script.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def digest(factor: int) -> str:
        made = f"class Scaler:\n    def scale(self, x={factor}):\n        return x\n"
        (tmp_path / "values_made.py").write_text(made)
        monkeypatch.delitem(sys.modules, "values_made", raising=False)
        main = types.ModuleType("__main__")
        main.__file__ = str(tmp_path / "script.py")
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec(compile(text, main.__file__, "exec"), main.__dict__)
        return code_identity(main.udf).digest  # type: ignore[attr-defined]  # made in memory

    assert digest(2) == digest(2)
    assert digest(2) != digest(33)


@pytest.mark.parametrize(
    "text",
    [
        "class Config:\n    limit = 1\n    def load(self, limit):\n        self.limit = limit\n"
        "CONFIG = Config()\ndef udf(x):\n    return CONFIG.limit\n"
        "if __name__ == '__main__':\n    CONFIG.load({})\n",
        "TABLE = dict()\ndef put(d, n):\n    d['n'] = n\ndef udf(x):\n    return TABLE['n']\n"
        "def main():\n    put(TABLE, {})\nif __name__ == '__main__':\n    main()\n",
        *(
            "TABLE = dict()\ndef put(d, n):\n    d['n'] = n\ndef udf(x):\n    return TABLE['n']\n"
            "class Own:\n    def run(self, d):\n        put(TABLE, {})\n"
            "def main():\n    t = TABLE\n    put(t, {})\n"
            f"if __name__ == '__main__':\n    {call}\n"
            for call in (
                "main()",
                "print(*map(put, [TABLE], [{}]))",
                "Own().run(3)",
                "f = main; f()",
                "print(list(map(lambda f: f(), [main])))",
                "for t in [TABLE]: put(t, {})",
            )
        ),
        "class All:\n    def add_one(self, f):\n        self.one = f\n"
        "ALL = All()\ndef udf(x):\n    return ALL.one(x)\n"
        "if __name__ == '__main__':\n    @ALL.add_one\n    def made(x):\n        return {}\n",
    ],
)
def test_what_code_under_the_main_guard_changes_counts(tmp_path, monkeypatch, text):
    script = tmp_path / "script.py"
    seen = [identities(script, text.replace("{}", n), monkeypatch)[-1] for n in "23"]
    assert seen[0] != seen[1]


def identities(script: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run a script; return the identities of `udf` at its calls of `see`, and at its end."""
    seen: list[str] = []
    main = types.ModuleType("__main__")
    main.__file__ = str(script)

    def see() -> None:
        seen.append(code_identity(main.udf).digest)  # type: ignore[attr-defined]  # made in memory

    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [script.name])
    script.write_text(text)
    monkeypatch.setattr(builtins, "see", see, raising=False)
    exec(compile(text, main.__file__, "exec"), vars(main))
    see()
    return seen


CACHED = "import functools\ndef doubled(f):\n    return functools.wraps(f)(lambda b: 2 * f(b))\n"
CALLED = "def udf(b):\n    return helper(b)\n"


@pytest.mark.parametrize(
    "text",
    [
        "def udf(b):\n    return b\nsee()\ndef udf(b):\n    return -b\n",
        "for n in 1, 2:\n    if n == 1:\n        def udf(b): return b\n        see()\n"
        "    else:\n        def udf(b): return -b\n",
        "for n in 1, 2, 3:\n    def one(b, n=n): return b * n\n    if n == 1: udf = one\n"
        "see()\nudf = one\n",
        "for n in 1, 2:\n    def udf(b, n=n): return b * n\n    if n == 1: see()\n",
        "if __name__ == '__main__':\n    def udf(b): return b\n    see()\n"
        "    def udf(b): return -b\n",
        "def udf(b):\n    return b\nsee()\ndef edit():\n    global udf\n"
        "    def udf(b): return -b\nedit()\n",
        "class udf:\n    def __call__(self, b): return b\nsee()\n"
        "class udf:\n    def __call__(self, b): return -b\n",
        "class Base:\n    def __call__(self, b): return self.n\n"
        "class udf(Base):\n    n = 1\nsee()\nclass udf(Base):\n    n = 2\n",
        f"{CACHED}@functools.cache\ndef udf(b):\n    return b\nsee()\n"
        "@functools.cache\ndef udf(b):\n    return -b\n",
        f"{CACHED}@doubled\ndef udf(b):\n    return b\nsee()\n"
        "@doubled\ndef udf(b):\n    return -b\n",
        f"{CACHED}def udf(b):\n    return b\nsee()\nudf = doubled(udf)\n",
        "try:\n    def udf(b): return b\n    see()\n    def udf(b): return -b\n"
        "finally:\n    pass\n",
        f"{CALLED}def helper(b):\n    return b\nsee()\ndef helper(b):\n    return -b\n",
        f"{CALLED}helper = lambda b: b\nsee()\ndef helper(b):\n    return -b\n",
        f"{CALLED}def helper(b):\n    return deeper(b)\ndef deeper(b):\n    return b\nsee()\n"
        "def deeper(b):\n    return -b\n",
        f"{CALLED}class helper:\n    n = 1\nsee()\nclass helper:\n    n = 2\n",
        f"{CALLED}helper = len('a')\nsee()\nhelper = len('ab')\n",
    ],
)
def test_a_script_may_bind_a_name_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    first, second = seen = identities(tmp_path / "script.py", text, monkeypatch)
    assert first != second, "the results of the first definition would be taken for the second's"
    assert identities(tmp_path / "script.py", f"# moved\n\n{text}", monkeypatch) == seen


@pytest.mark.parametrize(
    ("text", "counts", "not_counts"),
    [
        (
            "try:\n    import missing_one\n    def udf(b): return missing_one.f(b)\n"
            "except ImportError:\n    def udf(b): return -b\n",
            "-b",
            "",
        ),
        (
            "import sys\nif sys.platform:\n    def udf(b): return b\n"
            "else:\n    def udf(b): return -b\n",
            "return b",
            "",
        ),
        (
            "import typing\n@typing.overload\ndef udf(b: int) -> int: ...\n"
            "@typing.overload\ndef udf(b: str) -> str: ...\ndef udf(b):\n    return -b\n",
            "-b",
            "b: str",
        ),
        (
            "class udf:\n    @property\n    def n(self): return self._n\n"
            "    @n.setter\n    def n(self, n): self._n = -n\n",
            "-n",
            "",
        ),
        (
            "import functools\n@functools.singledispatch\ndef each(b): return b\n"
            "@each.register\ndef _(b: int): return -b\n@each.register\ndef _(b: str): return +b\n"
            "def udf(b): return each(b)\n",
            "-b",
            "",
        ),
        (
            "import threading\ndef udf(b):\n    udf._lock = threading.Lock()\n"
            "    return b + 1\nudf(1)\n",
            "+ 1",
            "",
        ),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass udf:\n    n: int = 1\n"
            "    def __call__(self, b): return b\n",
            "= 1",
            "",
        ),
    ],
)
def test_what_looks_like_a_second_definition_has_one_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, counts: str, not_counts: str
) -> None:
    script = tmp_path / "script.py"
    seen = identities(script, text, monkeypatch)
    assert identities(script, f"# moved\n\n{text}", monkeypatch) == seen
    assert identities(script, text.replace(counts, counts + "0"), monkeypatch) != seen
    if not_counts:
        assert identities(script, text.replace(not_counts, not_counts + "0"), monkeypatch) == seen


def test_notebook_cells_count_by_their_source() -> None:
    first, noted, words, code, size = digests_of_cells("cells")
    assert noted == first
    for edited in (words, code):
        assert [a != b for a, b in zip(edited, first)] == [True, True, False, False]
    assert [a != b for a, b in zip(size, first)] == [False, False, True, True]


def test_code_without_any_source_counts_by_its_bytecode() -> None:
    first, _, words, code, _ = digests_of_cells("")
    for edited in (words, code):
        assert set(edited[:2]).isdisjoint(first[:2])
