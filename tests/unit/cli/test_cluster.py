"""``vane-dagster cluster`` over the records of heads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from support.heads import accepting
from vane_dagster.cli import cluster
from vane_dagster.cli.main import main
from vane_dagster.compute import local_head
from vane_dagster.compute.local_head import Head, LocalHead


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("VANE_DAGSTER_HOME", str(tmp_path))
    monkeypatch.setattr(cluster, "marked", lambda mark: dict.fromkeys(range(5), "worker"))
    monkeypatch.setattr(cluster, "drivers", lambda mark, address: {8, 7})
    monkeypatch.setattr(local_head, "end", lambda mark: False)
    return lambda *arguments: CliRunner().invoke(main, ["cluster", *arguments])


@pytest.fixture
def head(call: Any) -> Iterator[Head]:
    place = LocalHead()
    place.folder.mkdir(mode=0o700)
    with accepting() as found:
        found = dataclasses.replace(found, settings=("--num-cpus=2",))
        (place.folder / "head.json").write_text(json.dumps(dataclasses.asdict(found)))
        (place.folder / "use.json").write_text(json.dumps({"idle_minutes": 60}))
        yield found


def test_no_head_is_an_empty_list(call):
    assert json.loads(call("list", "--json").stdout) == []
    assert "No local head is running" in call("list").stdout
    assert call("stop", "--all").stdout == "No local head is running: nothing to stop.\n"
    assert call("stop").stdout.endswith("is not running: nothing to stop.\n")


def test_heads_are_listed_with_what_they_claim(call, head, monkeypatch):
    (found,) = json.loads(call("list", "--json").stdout)
    assert (found["name"], found["environment"]) == (head.name, head.prefix)
    assert (found["address"], found["pid"]) == (head.address, head.pid)
    assert (found["options"], found["processes"]) == (["--num-cpus=2"], 5)
    assert found["drivers"] == [7, 8]
    assert (found["idle_minutes"], found["stops_at"]) == (60, None)
    shown = call("list").stdout.splitlines()
    assert shown[0].split()[:4] == ["NAME", "ENVIRONMENT", "ADDRESS", "PID"]
    assert shown[1].split()[:3] == [head.name, head.prefix, head.address]
    assert "--num-cpus=2" in shown[1]
    monkeypatch.setattr(cluster, "drivers", lambda mark, address: set())
    (idle,) = json.loads(call("list", "--json").stdout)
    assert idle["stops_at"] == pytest.approx(LocalHead().use().last_used + 3600)
    assert idle["idle_seconds"] >= 0


def test_a_head_is_stopped_by_its_address_or_its_name(call, head, monkeypatch):
    wrong = call("stop", "--address", "127.0.0.1:1")
    assert wrong.exit_code == 1
    assert f"has the address '127.0.0.1:1'; running: '{head.address}'" in wrong.stderr
    assert call("stop", "--address", head.address, "--all").exit_code == 2
    done = call("stop", "--address", head.address)
    assert f"at {head.address} was stopped, with all its workers." in done.stdout
    monkeypatch.setattr(local_head, "end", lambda mark: True)
    assert "leftover processes were ended" in call("stop", "--name", "default").stdout
