"""The identity of code in other processes: scripts, notebooks, hash seeds, and what is imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.code_project import DEFS, HELPERS, defs, project  # noqa: F401  # fixtures
from support.edits import Project
from support.paths import REPOSITORY


def test_hints_of_classes_in_cells_reach_names() -> None:
    constants = "class Config:\n    SIZE = 1\n"
    functions = (
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n    x: Config\n"
        "def udf(b):\n    return C(b)\n"
        "class Model:\n    def __call__(self, b):\n        return C(b)\n"
    )

    def digests(constants: str) -> list[str]:
        return console(CELLS.format(constants=constants, functions=functions), "1").split()

    assert set(digests(constants)).isdisjoint(digests(constants.replace("1", "2")))


def test_importing_the_identity_loads_nothing_heavy() -> None:
    code = (
        "from vane_dagster.fingerprint import bundle, code, objects\n"
        "heavy = {'ray', 'torch', 'dagster', 'numpy', 'pandas', 'pyarrow'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    assert console(code, "0") == "[]\n"


SCRIPT = """
import json, sys
sys.path.insert(0, {repository!r})
{body}
from vane_dagster.fingerprint import hashing, ast_digest
from vane_dagster.fingerprint.code import code_identity
if __name__ == "__main__":
    found = {{name: code_identity(globals()[name]).digest for name in {names!r}}}
    print(json.dumps(found))
"""
FIND = "from defs import Model, local, udf"


def run_script(folder: Path, body: str, names: list[str], seed: str = "0", *flags: str):
    script = folder / "script.py"
    script.write_text(SCRIPT.format(repository=str(REPOSITORY), body=body, names=names))
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, *flags, str(script)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_same_in_other_processes_folders_and_hash_seeds(defs: Project, tmp_path: Path) -> None:
    defs.edit("defs.py", "OTHER = 5", "OTHER = frozenset({'a', 'b', 'c', 'd'})")
    defs.edit(
        "defs.py",
        "features = other",
        "def make(n):\n    return lambda b: (n, b in {'x', 'y', 'z', 'w'})\n"
        "local = make({'p', 'q', 'r', 's'})\nfeatures = other",
    )
    copy = tmp_path / "another" / "place"
    shutil.copytree(defs.root, copy)
    names = ["udf", "Model", "local"]
    here = {name: defs.digest(name) for name in names}
    assert run_script(defs.root, FIND, names, "1") == here
    assert run_script(copy, FIND, names, "2") == here


def test_script_functions_are_found_by_their_file(tmp_path: Path) -> None:
    body = "K = 1\ndef helper(b):\n    return b + K\ndef udf(b):\n    return helper(b)\n"
    first = run_script(tmp_path, body, ["udf"])
    assert run_script(tmp_path, "# moved\n\n" + body, ["udf"]) == first
    assert run_script(tmp_path, body.replace("K = 1", "K = 2"), ["udf"]) != first


def console(code: str, seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{code}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CELLS = """
import linecache
def cell(number, text):
    name = f"<ipython-input-{{number}}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), globals())
cell(1, {constants!r})
cell(2, {functions!r})
from vane_dagster.fingerprint import hashing, ast_digest
from vane_dagster.fingerprint.code import code_identity
print(code_identity(udf).digest, code_identity(Model).digest)
"""


def test_notebook_cells_count_by_their_source() -> None:
    constants = "WORDS = {'a', 'b', 'c'}\n"
    functions = (
        "def helper(b):\n    return b\n"
        "def udf(b):\n    return helper(b), WORDS\n"
        "class Model:\n    def __call__(self, b):\n        return udf(b)\n"
    )

    def digests(seed: str, constants: str = constants, functions: str = functions) -> list[str]:
        return console(CELLS.format(constants=constants, functions=functions), seed).split()

    first = digests("1")
    assert digests("2", functions="# a note\n\n" + functions) == first
    for changed in (
        digests("1", constants="WORDS = {'a', 'b'}\n"),
        digests("1", functions=functions.replace("return b\n", "return -b\n")),
    ):
        assert changed[0] != first[0]
        assert changed[1] != first[1]


def test_code_without_any_source_counts_by_its_bytecode() -> None:
    code = (
        'exec(\'def udf(b):\\n    return b in {"x", "y", "z"}, K\\nclass M:\\n    f = udf\')\n'
        "K = KVALUE\n"
        "from vane_dagster.fingerprint.code import code_identity\n"
        "print(code_identity(udf).digest, code_identity(M).digest)\n"
    )
    first = console(code.replace("KVALUE", "1"), "1")
    assert console(code.replace("KVALUE", "1"), "2") == first
    assert set(console(code.replace("KVALUE", "2"), "1").split()).isdisjoint(first.split())


def test_script_that_changed_since_it_was_loaded_counts_as_it_is_in_memory(tmp_path: Path) -> None:
    body = (
        "def udf(b):\n    return b\n"
        "text = open(__file__).read()\n"
        "open(__file__, 'w').write(text.replace('return ' + 'b', 'return ' + '-b'))\n"
    )
    stale = run_script(tmp_path, body, ["udf"])
    fresh = run_script(tmp_path, body.replace("return b", "return -b"), ["udf"])
    assert stale != fresh
