"""The command line as an operator or a script meets it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from vane_dagster._private_folder import MARK
from vane_dagster.cli.main import main
from vane_dagster.compute.local_head import LocalHead


@pytest.mark.parametrize("module", ["vane_dagster", "vane_dagster.cli.main"])
def test_the_package_runs_as_a_module(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", module, "cluster", "stop", "--name", "absent"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "'absent'" in done.stdout
    assert "nothing to stop" in done.stdout
    wrong = subprocess.run([*command[:3], "nonsense"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2
    assert "No such command 'nonsense'" in wrong.stderr


class RefusedHead:
    """A process that runs as one of a head, whose state folder others can write to."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.local = LocalHead(home=home, name="refused")
        self.folder = self.local.folder
        self.folder.mkdir()
        (self.folder / "head.json").write_text("{}")
        self.folder.chmod(0o775)
        environment = {**os.environ, MARK: self.local.mark}
        self.process = subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)

    def command(self, *arguments: str) -> Result:
        environment = {"VANE_DAGSTER_HOME": str(self.home)}
        return CliRunner().invoke(main, ["cluster", *arguments], env=environment)


@pytest.fixture
def refused(tmp_path: Path) -> Iterator[RefusedHead]:
    head = RefusedHead(tmp_path)
    yield head
    head.process.kill()
    head.process.wait()


def test_a_head_in_a_refused_folder_is_no_head(refused: RefusedHead) -> None:
    listed = refused.command("list", "--json")
    assert (listed.exit_code, listed.stdout) == (0, "[]\n")
    for command in ("status", "stop"):
        answer = refused.command(command, "--name", "refused")
        assert answer.exit_code == 1
        assert f"{refused.folder} is not private" in answer.stderr
        assert "Remove it" in answer.stderr
    assert refused.process.poll() is None


def test_a_head_whose_folder_was_removed_is_stopped(refused: RefusedHead) -> None:
    (refused.folder / "head.json").unlink()
    refused.folder.rmdir()
    stopped = refused.command("stop", "--name", "refused")
    assert (stopped.exit_code, refused.process.wait(5)) == (0, -signal.SIGTERM)
    assert "leftover processes of it were ended" in stopped.stdout
    assert "nothing to stop" in refused.command("stop", "--name", "refused").stdout
