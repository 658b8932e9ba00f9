"""Identities in other processes: of code in scripts and notebooks, and of values."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.code_project import defs, project  # noqa: F401  # fixtures
from support.edits import Project
from support.paths import REPOSITORY, TESTS
from support.values import VALUES
from vane_dagster.fingerprint.objects import value_digest


def run(*arguments: str, seed: str = "0") -> str:
    """Run Python with another seed of hashes; return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": f"{TESTS}{os.pathsep}{REPOSITORY}",
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = """
import json
{body}
from vane_dagster.fingerprint.code import code_identity
if __name__ == "__main__":
    print(json.dumps({{name: code_identity(globals()[name]).digest for name in {names!r}}}))
"""


def run_script(folder: Path, body: str, names: list[str], seed: str = "0") -> dict[str, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(body=body, names=names))
    found: dict[str, str] = json.loads(run(str(script), seed=seed))
    return found


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
    assert run_script(copy, "from defs import Model, local, udf", names, "2") == here


def test_script_functions_are_found_by_their_file(tmp_path: Path) -> None:
    body = "K = 1\ndef helper(b):\n    return b + K\ndef udf(b):\n    return helper(b)\n"
    first = run_script(tmp_path, body, ["udf"])
    assert run_script(tmp_path, "# moved\n\n" + body, ["udf"]) == first
    assert run_script(tmp_path, body.replace("K = 1", "K = 2"), ["udf"]) != first
    replaced = (
        "text = open(__file__).read()\n"
        "open(__file__, 'w').write(text.replace('return ' + 'helper', 'return ' + '-helper'))\n"
    )
    in_memory = run_script(tmp_path, body + replaced, ["udf"])
    edited = run_script(tmp_path, body.replace("return helper", "return -helper"), ["udf"])
    assert in_memory != edited


CELLS = """
import linecache
from vane_dagster.fingerprint.code import code_identity

def cell(name, text):
    if not name:
        return exec(text, globals())
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), globals())

CONSTANTS = "WORDS = {'a', 'b', 'c'}\\nclass Config:\\n    SIZE = 1\\n"
FUNCTIONS = '''
import dataclasses
@dataclasses.dataclass
class C:
    x: Config
def helper(b):
    return b in {'x', 'y', 'z'}
def udf(b):
    return helper(b), WORDS
def hinted(b):
    return C(b)
class Model:
    def __call__(self, b):
        return udf(b)
class Hinted:
    def __call__(self, b):
        return C(b)
'''
for number, edit in enumerate([
    ("", ""), ("\\ndef helper", "\\n\\n# a note\\ndef helper"), ("'b', 'c'", "'b'"),
    ("b in", "b not in"), ("SIZE = 1", "SIZE = 2"),
]):
    cell(NAME and f"<ipython-input-{number}>", CONSTANTS.replace(*edit))
    cell(NAME and f"<ipython-input-{number}-2>", FUNCTIONS.replace(*edit))
    print(*(code_identity(each).digest for each in (udf, Model, hinted, Hinted)))
"""


def digests_of_cells(name: str, seed: str) -> list[list[str]]:
    return [line.split() for line in run("-c", f"NAME = {name!r}\n{CELLS}", seed=seed).splitlines()]


def test_notebook_cells_count_by_their_source() -> None:
    cells = digests_of_cells("cells", "1")
    assert digests_of_cells("cells", "2") == cells
    first, noted, words, code, size = cells
    assert noted == first
    for edited in (words, code):
        assert [a != b for a, b in zip(edited, first)] == [True, True, False, False]
    assert [a != b for a, b in zip(size, first)] == [False, False, True, True]


def test_code_without_any_source_counts_by_its_bytecode() -> None:
    first, _, words, code, _ = digests_of_cells("", "1")
    assert digests_of_cells("", "2")[0][:2] == first[:2]
    for edited in (words, code):
        assert set(edited[:2]).isdisjoint(first[:2])


DIGESTS = """
from support.values import VALUES
from vane_dagster.fingerprint.objects import value_digest as d
for value in [*VALUES, {'a', 'b', 'c', 1, None}, {'b': 1, 'a': 2}]:
    print(d(value))
try:
    import torch
except ImportError:
    raise SystemExit
found = [torch.float16, torch.float32, torch.device('cpu'), torch.arange(3), torch.arange(3.0),
         torch.tensor(1), torch.ones(2, 2).T, torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
assert len({d(value) for value in found}) == len(found)
assert d(torch.arange(6).reshape(2, 3).T.contiguous().T) == d(torch.arange(6).reshape(2, 3))
"""


def test_digests_of_values_are_the_same_in_another_process_and_order() -> None:
    values = [*VALUES, {None, 1, "c", "b", "a"}, {"b": 1, "a": 2}]
    assert run("-c", DIGESTS, seed="1").split() == [value_digest(value) for value in values]
