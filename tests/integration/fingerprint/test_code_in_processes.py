"""Identities of code and values in another process, with another seed of hashes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.cells import digests_of_cells
from support.code_project import defs, project  # noqa: F401  # fixtures
from support.edits import Project
from support.paths import REPOSITORY, TESTS
from support.values import VALUES
from vane_dagster.fingerprint.objects import value_digest

SCRIPT = """
from defs import Model, local, udf
from support.cells import digests_of_cells
from support.values import VALUES
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.objects import value_digest
for each in (udf, Model, local):
    print(code_identity(each).digest)
for value in [*VALUES, {'a', 'b', 'c', 1, None}, {'b': 1, 'a': 2}]:
    print(value_digest(value))
for name in ("cells", ""):
    print(*(digest for digests in digests_of_cells(name) for digest in digests))
try:
    import torch
except ImportError:
    raise SystemExit
found = [torch.float16, torch.float32, torch.device('cpu'), torch.arange(3), torch.arange(3.0),
         torch.tensor(1), torch.ones(2, 2).T, torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
assert len({value_digest(value) for value in found}) == len(found)
transposed = torch.arange(6).reshape(2, 3).T.contiguous().T
assert value_digest(transposed) == value_digest(torch.arange(6).reshape(2, 3))
"""


def test_identities_are_the_same_in_other_processes_folders_and_hash_seeds(
    defs: Project, tmp_path: Path
) -> None:
    defs.edit("defs.py", "OTHER = 5", "OTHER = frozenset({'a', 'b', 'c', 'd'})")
    defs.edit(
        "defs.py",
        "features = other",
        "def make(n):\n    return lambda b: (n, b in {'x', 'y', 'z', 'w'})\n"
        "local = make({'p', 'q', 'r', 's'})\nfeatures = other",
    )
    copy = tmp_path / "another" / "place"
    shutil.copytree(defs.root, copy)
    (copy / "script.py").write_text(SCRIPT)
    path = f"{TESTS}{os.pathsep}{REPOSITORY}"
    done = subprocess.run(
        [sys.executable, str(copy / "script.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "2", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    here = [defs.digest(name) for name in ("udf", "Model", "local")]
    here += map(value_digest, [*VALUES, {None, 1, "c", "b", "a"}, {"b": 1, "a": 2}])
    cells = [digest for name in ("cells", "") for each in digests_of_cells(name) for digest in each]
    assert done.stdout.split() == [*here, *cells]
