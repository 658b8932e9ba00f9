"""The thread of a model, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

FORKS = """
import os
from vane_dagster.worker.model_thread import ModelThread

child = ModelThread(slots=2).run(os.fork)
print("parent" if child else "child", os.waitpid(child, 0)[1] >> 8)
"""


def test_a_process_that_a_call_forks_ends_with_it():
    found = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True)
    assert found.stdout.split() == ["parent", "1"], found.stderr
