"""Errors of the command line, and options that several commands share."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import click
import pytest
import ray
from click.testing import CliRunner

from vane_dagster.cli import cluster, pools
from vane_dagster.cli.main import main
from vane_dagster.cli.options import IDS
from vane_dagster.compute import client


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("pools --json --name absent", 1, "'absent' is not running"),
        ("pools --json --address 127.0.0.1:1", 1, "'127.0.0.1:1'"),
        ("pools --json --name a --address b:1", 2, "not both"),
        ("pools --json --wrong", 2, "No such option"),
        ("pools --json evict x", 2, "write the options after evict"),
        ("pools endpoint x --json --name absent", 1, "'absent' is not running"),
        ("cluster list --json --wrong", 2, "No such option"),
        ("trace docs/x --json --id 1 --store nowhere", 1, "has no pipeline 'docs'"),
        ("trace docs/x --json --id 1 --store nosuch://x", 1, "no file system"),
        ("trace docs/x --json", 2, "Missing option '--id'"),
    ],
)
def test_errors_are_json_where_it_was_asked_for(arguments: str, code: int, words: str) -> None:
    done = CliRunner().invoke(main, arguments.split())
    assert done.exit_code == code
    assert words in json.loads(done.stdout)["error"]
    assert words in done.stderr
    plain = CliRunner().invoke(main, arguments.replace(" --json", "").split())
    assert plain.stdout == ""


def test_an_error_of_the_system_has_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied() -> None:
        raise PermissionError(13, "Permission denied", "/state")

    monkeypatch.setattr(cluster, "running_heads", denied)
    done = CliRunner().invoke(main, ["cluster", "list", "--json"])
    assert done.exit_code == 1
    assert done.stderr == "Error: [Errno 13] Permission denied: '/state'\n"
    assert "Permission denied" in json.loads(done.stdout)["error"]


class SilentPoolManager:
    class pools:
        @staticmethod
        def remote(*args: object) -> None:
            raise ray.exceptions.RayActorError


@pytest.fixture
def of_cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """A cluster with a pool manager."""

    def made(manager: Any) -> None:
        for name in ("local_head", "connect_address", "actor_names"):
            monkeypatch.setattr(pools, name, lambda *_: None)
        monkeypatch.setattr(client, "pool_managers", lambda: {"keeper-1": manager})

    return made


def test_a_pool_manager_that_does_not_answer_is_a_failure(of_cluster) -> None:
    of_cluster(SilentPoolManager)
    listed = CliRunner().invoke(main, ["pools", "--json"])
    assert listed.exit_code == 1
    assert json.loads(listed.stdout)["error"].startswith("keeper-1 does not answer")
    for command in ([], ["evict", "--all"], ["logs", "llm"]):
        done = CliRunner().invoke(main, ["pools", *command])
        assert (done.exit_code, done.stdout) == (1, "")


def test_a_pool_manager_that_dies_during_evict_is_named(of_cluster, monkeypatch) -> None:
    pool = {"keeper": "keeper-1", "identity": "abc", "label": "Model", "leases": []}
    of_cluster(SimpleNamespace(evict=SilentPoolManager.pools))
    monkeypatch.setattr(pools, "_listed", lambda name, address: [pool])
    done = CliRunner().invoke(main, ["pools", "evict", "--all"])
    assert done.exit_code == 1
    assert "keeper-1 does not answer to 'evict'" in done.stderr


def test_servers_of_one_name_are_told_apart_by_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [{"identity": id, "label": "server llm", "server": "llm"} for id in ("abc", "abd")]
    monkeypatch.setattr(pools, "_listed", lambda name, address: both)
    unclear = CliRunner().invoke(main, ["pools", "endpoint", "llm"])
    assert unclear.exit_code == 1
    assert "there are 2 pools 'llm'" in unclear.stderr
    assert "server llm (abc), server llm (abd)" in unclear.stderr.replace("'", "")


def test_a_pool_is_named_by_its_label_if_it_is_the_only_one():
    one, two = ({"identity": id, "label": id * 2, "server": ""} for id in ("abc", "abd"))
    assert pools._chosen([one, two], "abcabc") == [one]
    with pytest.raises(click.ClickException, match="there are 2 pools 'ab'"):
        pools._chosen([one, two], "ab")


def test_the_package_runs_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["vane_dagster", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("vane_dagster", run_name="__main__")
    assert ended.value.code == 0
    assert "vane-dagster, version" in capsys.readouterr().out


SHARED = {
    "--ids": {"preview"},
    "--partition": {"preview", "trace"},
    "--partitions": {"adopt", "diff", "plan", "quarantine"},
    "--python-file": {
        *("adopt", "batches cancel", "batches collect", "batches list", "diff", "plan"),
        *("preview", "quarantine", "trace"),
    },
    "--json": {
        *("adopt", "advise", "batches list", "cluster list", "diff", "logs"),
        *("plan", "pools", "pools endpoint", "pools logs", "preview", "quarantine"),
        *("store gc", "store ls", "trace"),
    },
}


@click.command()
@IDS
def shown(ids: list[str] | None) -> None:
    """Print the ids."""
    click.echo(repr(ids))


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ([], None),
        (["--ids", "17"], ["17"]),
        (["--ids", "a, b"], ["a", "b"]),
        (["--ids", "a,b", "--ids", "007"], ["a", "b", "007"]),
        (["--ids", '"a,b",c'], ["a,b", "c"]),
        (["--ids", 'an "id"'], ['an "id"']),
    ],
)
def test_ids_are_texts_with_commas_between_them(words: list[str], ids: list[str] | None) -> None:
    assert CliRunner().invoke(shown, words).output == f"{ids}\n"


@pytest.mark.parametrize("text", ["", '"a', "a\nb"])
def test_a_list_that_cannot_be_read_is_refused(text: str) -> None:
    done = CliRunner().invoke(shown, ["--ids", text])
    assert (done.exit_code, "Invalid value for '--ids'" in done.output) == (2, True)


def commands(group: click.Group, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield the commands of a group, and those in it, by their words."""
    for word in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), word)
        assert command is not None
        yield f"{name} {word}".strip(), command
        if isinstance(command, click.Group):
            yield from commands(command, word)


@pytest.mark.parametrize("option", SHARED)
def test_commands_declare_an_option_alike(option: str) -> None:
    taking, declared = set(), set()
    for words, command in commands(main):
        for each in command.params:
            if option in each.opts:
                assert isinstance(each, click.Option)
                taking.add(words)
                declared.add((each.help, each.multiple, str(each.metavar)))
    assert taking == SHARED[option]
    assert len(declared) == 1
