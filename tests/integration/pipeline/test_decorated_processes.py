"""Classes under `vd.cls` in other processes: where they are constructed at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROCESS = """
import copy, pickle, sys
import defs
from vane_dagster._worker_process import mark_worker
from vane_dagster.pipeline.lazy_instances import LazyInstance
assert isinstance(defs.MODEL, LazyInstance)
mark_worker()
made = defs.Model(1)
assert type(made) is defs.Model
assert type(made.inner()) is defs.Model
assert copy.copy(made).n == 1
import later  # declares a pipeline
assert isinstance(later.MODEL, LazyInstance)
assert made.imported() is later.MODEL
import multiprocessing
with multiprocessing.get_context("spawn").Pool(1) as pool:
    assert pool.apply(made.kind) == "Model"
"""


def test_a_worker_constructs_at_once_except_what_a_module_declares(tmp_path: Path) -> None:
    (tmp_path / "defs.py").write_text(
        "import vane_dagster as vd\n"
        "@vd.cls\nclass Model:\n"
        "    def __init__(self, n):\n        self.n = n\n"
        "    def inner(self):\n        return Model(2)\n"
        "    def kind(self):\n        return type(Model(3)).__name__\n"
        "    def imported(self):\n        from later import MODEL\n        return MODEL\n"
        "MODEL = Model(1)\n"
    )
    (tmp_path / "later.py").write_text("import defs\nMODEL = defs.Model(5)\n")
    (tmp_path / "main.py").write_text(
        "if __name__ == '__main__':\n"
        + "".join(f"    {line}\n" for line in PROCESS.strip().splitlines())
    )
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
