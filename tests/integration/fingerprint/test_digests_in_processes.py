"""Digests of values are equal in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from support.paths import REPOSITORY, TESTS
from support.values import VALUES
from vane_dagster.fingerprint.objects import value_digest

CODE = """
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


def test_digests_are_the_same_in_another_process_and_order() -> None:
    values: list[Any] = [*VALUES, {None, 1, "c", "b", "a"}, {"b": 1, "a": 2}]
    environment = {
        **os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": f"{TESTS}{os.pathsep}{REPOSITORY}",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [value_digest(value) for value in values]
