"""``vane-dagster``: commands for runs, the cluster and the store, each imported on use."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
from typing import Any

import click

from vane_dagster.errors import VaneError

_COMMANDS = {
    "plan": "Show what a run would compute, why, and what it would cost.",
    "preview": "Compute some rows of a stage, and store nothing.",
    "batches": "List, collect and cancel batches of providers.",
    "quarantine": "List the failed rows of a stage by error, and retry them.",
    "adopt": "Keep stored rows after an edit that changes no result.",
    "advise": "Show what limited a run, and what would shorten it.",
    "diff": "Compare two versions of a stage's rows.",
    "logs": "Print what the workers of a stage wrote in a run.",
    "cluster": "List and stop the local Ray heads.",
    "pools": "List and evict warm models and model servers, and print their logs.",
    "store": "List and clean a store, and promote a branch.",
    "trace": "Follow a row back to the source, or forward.",
}
"""The commands; each is the function of this name in the module of this name."""


class _Commands(click.Group):
    """A group of commands that are imported on use.

    Errors that state a fix are shown on stderr without a traceback. A command with ``--json`` then
    prints an object with the error, so its output is JSON in every case.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(f"vane_dagster.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*_COMMANDS.items()])  # without an import of the commands

    def invoke(self, ctx: click.Context) -> Any:
        as_json = "--json" in ctx.args
        try:
            try:
                return super().invoke(ctx)
            except (VaneError, OSError) as error:
                if isinstance(error, BrokenPipeError):  # click handles it
                    raise
                raise click.ClickException(str(error)) from error
        except click.ClickException as error:
            if as_json:
                click.echo(json.dumps({"error": error.format_message()}))
            raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="vane-dagster", prog_name="vane-dagster")
def main() -> None:
    """Offline batch inference as Dagster assets, on Ray, with models that stay loaded."""
    atexit.register(gc.freeze)  # the interpreter would search all of Dagster for garbage: 0.4 s


if __name__ == "__main__":
    main(prog_name="vane-dagster")
