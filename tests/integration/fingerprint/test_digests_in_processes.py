"""Digests of values are equal in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import REPOSITORY, TESTS
from support.values import (
    VALUES,
)
from vane_dagster.fingerprint.objects import value_digest


def test_digests_are_the_same_in_another_process_and_order() -> None:
    here = [value_digest(value) for value in VALUES]
    code = (
        f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(REPOSITORY)!r}]\n"
        "from support.values import VALUES\n"
        "from vane_dagster.fingerprint.objects import value_digest\n"
        "for value in VALUES: print(value_digest(value))\n"
        "print(value_digest({'a', 'b', 'c', 1, None}), value_digest({'b': 1, 'a': 2}))\n"
    )
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
        assert done.stdout.split()[:-2] == here
    assert len(outputs) == 1


def test_torch_values_when_torch_is_there() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "import torch\nfrom vane_dagster.fingerprint.objects import value_digest as d\n"
        "found = [d(v) for v in (torch.float16, torch.float32, torch.device('cpu'),"
        " torch.arange(3), torch.arange(3.0), torch.tensor(1), torch.ones(2, 2).T)]\n"
        "assert len(set(found)) == len(found)\n"
        "assert d(torch.arange(6).reshape(2, 3).T.contiguous().T) == "
        "d(torch.arange(6).reshape(2, 3))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_class_of_the_user_counts_with_its_code(tmp_path: Path) -> None:
    digests = []
    for factor in (1, 1, 2):
        folder = tmp_path / f"copy{len(digests)}"
        folder.mkdir()
        (folder / "options_of_user.py").write_text(
            "import dataclasses\n@dataclasses.dataclass\nclass Options:\n    size: int = 1\n"
            f"    def scaled(self):\n        return self.size * {factor}\n"
        )
        code = (
            f"import sys; sys.path[:0] = [{str(folder)!r}, {str(REPOSITORY)!r}]\n"
            "from vane_dagster.fingerprint.objects import value_digest as d\n"
            "import options_of_user as o\nprint(d({'options': o.Options()}))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout)
    assert digests[0] == digests[1] != digests[2]
