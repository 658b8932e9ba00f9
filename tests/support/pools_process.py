"""Runs in their own processes, of models in a file that a test may edit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.forked import Program

RUN = Path(__file__).with_name("pools_run.py")
CLUSTER = {"name": "tests", "num_cpus": 2, "resources": {"accelerator": 1}}


MODELS = textwrap.dedent(
    '''
    """Models of a user's own."""

    import os
    import time

    FACTOR = 2

    def note(log, name, *values):
        with open(os.path.join(log, name), "a") as opened:
            opened.write("".join(f"{value}\\n" for value in values))

    class Model:
        """Says who loads it."""

        def __init__(self, log, sleep=0.0, tag=""):
            self.log, self.sleep = log, sleep
            note(log, "loads" + tag, os.getpid())

        def __call__(self, batch):
            # this is a comment
            ids = batch["id"].to_pylist()
            note(self.log, "calls", *ids)
            time.sleep(self.sleep)
            out = [FACTOR * n for n in ids]
            return {"id": ids, "out": out, "pid": [os.getpid()] * len(ids)}
    '''
)


class Process:
    def __init__(
        self,
        tmp_path: Path,
        stages: dict[str, Any],
        partitions: str,
        variables: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Start the run; `variables` are those that Ray reads as it is imported."""
        (tmp_path / "models").mkdir(exist_ok=True)
        module = tmp_path / "models" / "models.py"
        if not module.exists():
            module.write_text(MODELS)
        for stage in stages.values():
            stage.setdefault("model", "Model")
            stage["fn_constructor_kwargs"] = {
                "log": str(tmp_path), **stage.get("fn_constructor_kwargs", {})
            }  # fmt: skip
        where = (
            {}
            if {"address", "resource", "kuberay", "local"} & options.keys()
            else {"cluster": CLUSTER}
        )
        folders = {"root": str(tmp_path), "models": str(tmp_path / "models")}
        given = {**folders, **where, "stages": stages, "partitions": list(partitions), **options}
        # A process that has connected to the local head has its settings in its environment.
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        program, pipe = [str(RUN), json.dumps(given)], subprocess.PIPE
        self.process: Program | subprocess.Popen[str]
        if variables is None:
            self.process = Program(program, clean, tmp_path)
        else:
            self.process = subprocess.Popen(
                [sys.executable, *program],
                env={**clean, **variables},
                stdout=pipe,
                stderr=pipe,
                text=True,
            )

    def done(self) -> list[dict[str, Any]]:
        out, err = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, err[-4000:]
        self.output = out + err
        # Ray may print messages of the cluster after it.
        (printed,) = [line for line in out.splitlines() if line.startswith("[{")]
        return json.loads(printed)

    def failed(self) -> str:
        out, err = self.process.communicate(timeout=120)
        assert self.process.returncode != 0, out
        return out + err

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
