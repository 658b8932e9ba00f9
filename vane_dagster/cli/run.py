"""``vane-dagster run``: one run of Dagster from the command line, with a timeline on request."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import click


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--profile", is_flag=True, help="Log the timeline of each step of a pipeline.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def run(profile: bool, options: tuple[str, ...]) -> None:
    """Materializes assets, by the OPTIONS of `dagster asset materialize`.

    Example: vane-dagster run --profile -f definitions.py --select "*" --partition 2026-01-02
    """
    began = time.time()
    environment = {**os.environ, "VANE_DAGSTER_PROFILE": f"{began}"} if profile else None
    command = [sys.executable, "-m", "dagster", "asset", "materialize", *options]
    status = subprocess.run(command, env=environment).returncode
    if profile:
        click.echo(f"the whole command took {time.time() - began:.2f} s")
    sys.exit(status)
