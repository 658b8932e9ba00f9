"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from vane_dagster.cli.main import main
from vane_dagster.cli.options import IDS

SHARED = {
    "--ids": {"preview", "quarantine"},
    "--partition": {"preview", "trace"},
    "--partitions": {"adopt", "diff", "plan", "quarantine"},
    "--python-file": {
        *("adopt", "batches cancel", "batches collect", "batches list", "plan", "preview"),
        *("quarantine", "store promote", "trace"),
    },
    "--storage-options": {
        *("diff", "quarantine", "store du", "store gc", "store ls", "store promote", "trace"),
    },
    "--json": {
        *("adopt", "advise", "batches list", "cluster list", "cluster status", "diff", "logs"),
        *("plan", "pools", "pools endpoint", "pools logs", "preview", "quarantine", "store du"),
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
