"""A project made by ``create-dagster``, with a component made by ``dg scaffold``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RESOURCES = """
import dagster as dg
import vane_dagster as vd


@dg.definitions
def resources() -> dg.Definitions:
    return dg.Definitions(
        resources={"compute": vd.LocalCompute(), "store": vd.FragmentStore(root="store")}
    )
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dg")
    command(folder, "create-dagster", "project", "reviews", "--no-uv-sync")
    return folder / "reviews"


def command(folder: Path, *words: str, fails: bool = False) -> str:
    bin = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "src"),  # in place of an installation
        "DAGSTER_HOME": str(folder.parent),
        "DG_CLI_CONFIG": str(folder.parent / "dg.toml"),
        "COLUMNS": "200",
    }
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert (done.returncode != 0) is fails, done.stdout
    return done.stdout


def test_a_scaffolded_component_is_checked_listed_launched_and_planned(project):
    assert "vane_dagster.PipelineComponent" in command(project, "dg", "list", "components")
    command(project, "dg", "scaffold", "defs", "vane_dagster.PipelineComponent", "docs")
    defs = project / "src/reviews/defs"
    scaffolded = (defs / "docs/defs.yaml").read_text()
    assert "compute: {}\n  store: {}" in scaffolded
    own = scaffolded.replace("compute: {}\n  store: {}", "overrides: {sentiment: {num_cpus: 1}}")
    (defs / "docs/defs.yaml").write_text(own.replace("num_cpus", "num_cpu"))
    assert "defs.yaml:5" in command(project, "dg", "check", "yaml", fails=True)
    (defs / "docs/defs.yaml").write_text(own)
    (defs / "resources.py").write_text(RESOURCES)
    assert "docs/sentiment" in command(project, "dg", "list", "defs")
    assert "not computed before" in command(project / "src", "vane-dagster", "plan", "docs")
    command(project, "dg", "launch", "--assets", "docs/sentiment")
    assert "up to date" in command(project, "vane-dagster", "plan", "docs")
