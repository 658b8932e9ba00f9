"""The pipelines and resources of a user's definitions, for the commands that need them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import tomllib
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import dagster as dg

from vane_dagster.errors import described
from vane_dagster.fingerprint.modules import path_kind
from vane_dagster.orchestration.assets import PIPELINES
from vane_dagster.orchestration.partition_order import partition_keys
from vane_dagster.orchestration.read import open_store
from vane_dagster.orchestration.resources import LocalCluster
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.storage.store import Store


class Definitions:
    """Definitions, imported as Dagster does: the working folder is on the path."""

    def __init__(self, file: str | None, module: str | None) -> None:
        self.options = ["-f", file] if file else ["-m", module] if module else []
        if file is None and module is None:
            module = _project_module()
        elif file is not None and module is not None:
            raise click.UsageError("give the definitions as -f or as -m, not both")
        if file is not None and not Path(file).is_file():
            raise click.UsageError(f"there is no file {file!r}")
        sys.path.insert(0, os.getcwd())
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what they print is not a result
                loaded = importlib.import_module(module) if module else _executed(str(file))
                values = [
                    # Those of @dg.definitions are made when they are called.
                    value() if type(value).__name__ == "LazyDefinitions" else value
                    for value in list(vars(loaded).values())
                ]
        except Exception as error:
            text = f"{file or module} cannot be loaded: {described(error)}"
            cause: BaseException = error
            while cause.__cause__ is not None:  # that of a component names only the component
                cause = cause.__cause__
            text += f"\n{described(cause)}" * (cause is not error)
            raise click.ClickException(text + _raised_at(cause)) from error
        self._definitions = [value for value in values if isinstance(value, dg.Definitions)]

    def pipeline(self, name: str | None) -> Any:
        """Return the pipeline with a name, or the only one."""
        if name in PIPELINES:
            return PIPELINES[name]
        if name is None and len(PIPELINES) == 1:
            return next(iter(PIPELINES.values()))
        known = ", ".join(sorted(PIPELINES)) or "none"
        raise click.UsageError(f"name one of the pipelines of the definitions: {known}")

    def stage(self, path: str, or_source: bool = False) -> Any:
        """Return a stage by its path, as docs/embedding; the pipeline may be left out.

        If it may be the source, as docs/source or docs, return the pipeline for that.
        """
        pipeline, _, name = path.rpartition("/")
        if or_source and (name == SOURCE or path in PIPELINES):
            return self.pipeline(path if path in PIPELINES else pipeline or None)
        target = self.pipeline(pipeline or None)
        if name not in target.stages:
            stages = ", ".join(target.stages)
            raise click.UsageError(f"{name!r} is not a stage of {target.name}: {stages}")
        return target[name]

    def resources(self) -> dict[str, Any]:
        """Return the resources of a run, as arguments of `Pipeline.run` and others."""
        return {key: self.resource(key) for key in ("store", "compute")}

    def resource(self, key: str, starts: bool = True) -> Any:
        """Return the resource with a key, initialized until the command ends; None without one.

        Unless `starts`, no resource is initialized that would start a cluster.
        """
        for definitions in self._definitions:
            if (resource := (definitions.resources or {}).get(key)) is not None:
                cluster = getattr(resource, "cluster", None)
                if not (starts or isinstance(cluster, (LocalCluster, type(None)))):
                    return resource
                try:
                    opened = resource.process_config_and_initialize_cm()
                    return click.get_current_context().with_resource(opened)
                except Exception as error:  # as a variable that is not set
                    text = f"the resource {key!r} is not complete: {described(error)}"
                    raise click.ClickException(text) from error
        return None


def _raised_at(error: BaseException) -> str:
    """Return the last line of the user's files in a traceback; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.realpath(frame.filename)
        if os.path.isfile(path) and path_kind(path) == "own":
            return f"\nat {path.removeprefix(os.path.join(os.getcwd(), ''))}, line {frame.lineno}"
    return ""


def _project_module() -> str:
    """Return the module with the definitions of the `dg` project around the working folder.

    The folder with its code is added to the path.
    """
    for folder in (Path.cwd(), *Path.cwd().parents):
        file = folder / "dg.toml"  # dg ignores the other one beside it
        file = file if file.is_file() else folder / "pyproject.toml"
        settings = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if file.name == "pyproject.toml":
            settings = settings.get("tool", {}).get("dg", {})
        if project := settings.get("project"):
            code = folder / "src"
            sys.path.insert(0, str(code if code.is_dir() else folder))
            default = f"{project['root_module']}.definitions"
            return str(project.get("code_location_target_module", default))
    raise click.UsageError(
        "give the definitions, with -f defs.py or -m my.definitions, or call this in a dg project"
    )


def with_definitions(is_optional: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Give a command -f and -m, and the definitions that they name as `definitions`."""

    def decorate(command: Callable[..., Any]) -> Any:
        @click.option("-f", "--python-file", "file", help="File with the definitions.")
        @click.option("-m", "--module-name", "module", help="Module with the definitions.")
        @wraps(command)
        def loaded(*, file: str | None, module: str | None, **given: Any) -> Any:
            is_named = file is not None or module is not None
            opened = Definitions(file, module) if is_named or not is_optional else None
            return command(definitions=opened, **given)

        return loaded

    return decorate


def opened(store: str | None, definitions: Definitions | None = None) -> Store:
    """Open the store that a command names, else that of the definitions, else this user's."""
    if store is None and definitions is None:
        with contextlib.suppress(click.UsageError):  # the working folder is in no dg project
            definitions = Definitions(None, None)
    if store is not None or definitions is None:
        return open_store(store, "--store")
    return open_store(definitions.resource("store"), "the resource 'store'")


def stored_rows(
    definitions: Definitions | None, stage: str, partitions: list[str] | None, store: str | None
) -> tuple[Any, list[str] | None, Store]:
    """Return a stage, the keys of its partitions, and the store, as a command names them.

    With definitions, partitions may be ranges. None stands for all, or for no partitions.
    """
    place = opened(store, definitions)
    if definitions is None:
        return stage, partitions, place
    target = definitions.stage(stage)
    if partitions is not None:
        keys = partition_keys(target.pipeline, partitions, "--partitions")
        partitions = [key for key in keys if key is not None] or None
    return target, partitions, place


def _executed(file: str) -> ModuleType:
    """Execute a file as the module of its name, unless another module has that name."""
    name = Path(file).stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, loaded)
    spec.loader.exec_module(loaded)
    return loaded
