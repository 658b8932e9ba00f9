"""Processes of servers, of their clients and of drivers, killed at random times."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import psutil
import pytest

import vane_dagster as vd
from support import forked, server_kills
from support.data import write_source
from support.paths import TESTS
from support.pool_models import until
from support.server_kills import KINDS, ROWS, declared, living, servers
from vane_dagster.compute.local_head import LocalHead

KILLS, MAX_RUNS = 4, 6


@pytest.fixture(scope="module")
def own_home() -> Iterator[None]:
    """A state folder with a head of its own, which runs of other processes find."""
    folder = tempfile.mkdtemp(prefix="vkh-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VANE_DAGSTER_HOME", folder)
        yield
        LocalHead().stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("compute", ["local", "ray"])
def test_no_row_is_lost_and_nothing_is_left(own_home, compute, tmp_path):
    """Of the runs, those whose driver was killed fail, and no others."""
    chance, killed = random.Random(1), []
    kinds = [kind for kind in KINDS if compute == "ray" or kind != "pool manager"]
    write_source(tmp_path / "src", {"id": range(ROWS)})
    replicas = chance.choice([1, 2])
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env["PYTHONPATH"] = str(TESTS)
    for number in range(MAX_RUNS):
        is_killed, log = False, tmp_path / f"log-{number}"
        with log.open("ab") as out, log.open("ab") as err:
            given = [server_kills.__file__, str(tmp_path), str(replicas), compute]
            output = {out.fileno(): 1, err.fileno(): 2}
            driver = forked.server(forked.DRIVER).start(given, env, output, TESTS)
        while driver.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(chance.uniform(0.3, 2.0))
            kind = chance.choice(kinds)
            if len(killed) == KILLS or not (tmp_path / "requests").exists():
                continue
            if victims := living(kind, tmp_path, driver):
                with contextlib.suppress(psutil.Error):
                    chance.choice(victims).kill()
                    killed.append(kind)
                    is_killed |= kind == "driver"
        assert driver.returncode == 0 or is_killed, (killed, log.read_text()[-4000:])
        if driver.returncode == 0:
            break
    assert killed, "nothing was killed in time"
    store, pipeline = str(tmp_path / "store"), declared(tmp_path, replicas)
    for stage in ("answered", "asked"):
        rows = vd.load(pipeline[stage], store=store).sort_by("id").to_pylist()
        assert [row["id"] for row in rows] == [*range(ROWS)], killed
        assert all(row["answer"] == f"echo: row {row['id']}" for row in rows), killed
        assert vd.quarantine(pipeline[stage], store=store).num_rows == 0, killed
    if compute == "ray":  # that of a run without a cluster ends with it
        evict = (
            "from vane_dagster.cli.main import main; main(['pools', 'evict', 'echo', '--force'])"
        )
        forked.run(["-c", evict], env, TESTS, 120)
    until(lambda: not servers(tmp_path), "no process of the server is left")
