"""The pipelines and resources of a user's definitions, for the commands that need them."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import click
import dagster as dg

from vane_dagster.orchestration.assets import PIPELINES

FILE = click.option("-f", "--python-file", "file", help="The file with the definitions.")
MODULE = click.option("-m", "--module-name", "module", help="The module with the definitions.")


class Definitions:
    """Definitions, imported as Dagster does: the working folder and the file's are on the path."""

    def __init__(self, file: str | None, module: str | None) -> None:
        if (file is None) == (module is None):
            raise click.UsageError(
                "give the definitions, as -f definitions.py or -m my.definitions"
            )
        sys.path.insert(0, os.getcwd())
        if file is not None:
            if not Path(file).is_file():
                raise click.UsageError(f"there is no file {file!r}")
            sys.path.insert(0, str(Path(file).resolve().parent))
        loaded = importlib.import_module(module or Path(str(file)).stem)
        found = [
            # Those of @dg.definitions are made when they are called.
            value() if type(value).__name__ == "LazyDefinitions" else value
            for value in list(vars(loaded).values())
        ]
        self._definitions = [value for value in found if isinstance(value, dg.Definitions)]

    def pipeline(self, name: str | None) -> Any:
        """Return the pipeline with a name, or the only one."""
        if name in PIPELINES:
            return PIPELINES[name]
        if name is None and len(PIPELINES) == 1:
            return next(iter(PIPELINES.values()))
        known = ", ".join(sorted(PIPELINES)) or "none"
        raise click.UsageError(f"name one of the pipelines of the definitions: {known}")

    def stage(self, path: str) -> Any:
        """Return a stage by its path, as docs/embedding; the pipeline may be left out."""
        pipeline, _, name = path.rpartition("/")
        found = self.pipeline(pipeline or None)
        if name not in found.stages:
            stages = ", ".join(found.stages)
            raise click.UsageError(f"{name!r} is no stage of {found.name}: {stages}")
        return found[name]

    def resource(self, kind: type) -> Any:
        """Return the first resource of a kind, with its values; None without one."""
        for definitions in self._definitions:
            for resource in (definitions.resources or {}).values():
                if isinstance(resource, kind):
                    return resource.process_config_and_initialize()  # type: ignore[attr-defined]
        return None
