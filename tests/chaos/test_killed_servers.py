"""Processes of a server, of its clients and of its drivers, killed at random times."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from support.server_kills import KINDS, campaign_round


@pytest.fixture(scope="module")
def own_home() -> Iterator[None]:
    """A state folder with a head of its own, which runs of other processes find."""
    folder = tempfile.mkdtemp(prefix="vkh-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VANE_DAGSTER_HOME", folder)
        yield
        command = [sys.executable, "-m", "vane_dagster.cli.main", "cluster", "stop"]
        subprocess.run(command, check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(("compute", "seed"), [("local", 1), ("ray", 1)])
def test_no_row_is_lost_and_nothing_is_left(own_home, compute, seed):
    kinds = KINDS if compute == "ray" else tuple(k for k in KINDS if k != "pool manager")
    found = campaign_round(random.Random(seed), 4, compute, kinds)
    assert found.killed, "nothing was killed in time"
    assert (found.lost, found.twice, found.wrong, found.quarantined) == (0, 0, 0, 0), found
    assert found.left == 0, found
    assert found.failures == []
