"""The command line as an operator or a script meets it."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_a_head_in_a_refused_folder_is_no_head_until_its_folder_is_removed(tmp_path: Path) -> None:
    def command(*arguments: str) -> Result:
        environment = {"VANE_DAGSTER_HOME": str(tmp_path)}
        return CliRunner().invoke(main, ["cluster", *arguments], env=environment)

    local = LocalHead(home=tmp_path, name="refused")
    local.folder.mkdir()
    (local.folder / "head.json").write_text("{}")
    local.folder.chmod(0o775)
    environment = {**os.environ, MARK: local.mark}
    process = subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)
    try:
        listed = command("list", "--json")
        assert (listed.exit_code, listed.stdout) == (0, "[]\n")
        for verb in ("status", "stop"):
            answer = command(verb, "--name", "refused")
            assert answer.exit_code == 1
            assert f"{local.folder} is not private" in answer.stderr
            assert "Remove it" in answer.stderr
        assert process.poll() is None
        (local.folder / "head.json").unlink()
        local.folder.rmdir()
        stopped = command("stop", "--name", "refused")
        assert (stopped.exit_code, process.wait(5) < 0) == (0, True)
        assert "leftover processes of it were ended" in stopped.stdout
    finally:
        process.kill()
        process.wait()
