"""Options that several commands share."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from vane_dagster.cli.main import main
from vane_dagster.cli.options import IDS

SHARED = {
    "--ids": {"preview", "quarantine"},
    "--partition": {"preview", "trace"},
    "--partitions": {"adopt", "diff", "plan", "quarantine"},
    "--python-file": {"adopt", "plan", "preview", "quarantine", "store promote", "trace"},
    "--storage-options": {"diff", "quarantine", "store gc", "store promote", "trace"},
}
COMMANDS = ("adopt", "diff", "plan", "preview", "quarantine", "store gc", "store promote", "trace")


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


@pytest.mark.parametrize("option", SHARED)
def test_commands_declare_an_option_alike(option: str) -> None:
    taking, declared = set(), set()
    for words in COMMANDS:
        command: click.Command | None = main
        for word in words.split():
            assert isinstance(command, click.Group)
            command = command.get_command(click.Context(command), word)
        assert command is not None
        for each in command.params:
            if option in each.opts:
                assert isinstance(each, click.Option)
                taking.add(words)
                declared.add((each.help, each.multiple, str(each.metavar)))
    assert taking == SHARED[option]
    assert len(declared) == 1
