"""Processes of servers, of their clients and of drivers, killed at random times or by a row."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

import vane_dagster as vd
from support.data import read_stage
from support.misbehaving_server import requests
from support.server_kills import KINDS, campaign_round
from support.server_runs import echo, prompting


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


# A row that ends its server


def test_a_row_that_ends_the_server_costs_one_row(tmp_path, local, materialize):
    server = echo("llm", f"--requests={tmp_path}/requests", version="1")
    texts = [f"row {n}" + " poison" * (n == 7) for n in range(30)]
    materialize(prompting(tmp_path / "src", server, texts, workers=2), local)
    table = read_stage(tmp_path / "store", "prompting", "answers")
    assert sorted(table["id"].to_pylist()) == [n for n in range(30) if n != 7]
    aside = vd.quarantine("prompting/answers", store=str(tmp_path / "store"))
    assert (aside["id"].to_pylist(), aside["error"].to_pylist()) == ([7], ["ServerDied"])
    assert requests(tmp_path / "requests").count("row 7 poison") == 5
