"""Print the public names with their parameters and fields, and compare the API with its record.

    python tools/api.py           # print the names
    python tools/api.py --check   # fail beyond the limits, and if `tools/api.txt` differs
    python tools/api.py --record  # write `tools/api.txt`

`tools/api.txt` has a line for each thing that users may rely on: names with their parameters and
defaults, fields, errors with their bases, commands with their options, metadata entries, and
environment variables. A line that is gone is a removal or a change, which the policy of releases in
`CONTRIBUTING.md` restricts.

What a name takes counts: the parameters of a function, of a constructor and of each public method,
without ``self``, and each key of a TypedDict; the fields of a record or a Dagster resource.
``**options: Any`` of a class is beyond every limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, get_type_hints

import click

import vane_dagster as vd
from vane_dagster import checks, errors, sources, testing
from vane_dagster._keywords import full_signature
from vane_dagster.cli.main import main as cli

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tools" / "api.txt"
_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
POLICY = """
Removed or changed, which users may rely on:
{lines}
Keep it, with a DeprecationWarning that names the replacement, until a minor release after the one
that deprecates it (CONTRIBUTING.md, "Deprecation"). If that release has come, or the thing was
never released: list the removal in CHANGELOG.md, and run python tools/api.py --record"""
ADDED = """
Added, which is fine:
{lines}
Run python tools/api.py --record"""
MAX_NAMES = 45
MAX_PARAMETERS = 16
MAX_FIELDS = 12


def public_names() -> list[str]:
    """Return the exported names, without those of Python's own protocols."""
    return sorted(name for name in vd.__all__ if not name.startswith("__"))


def parameters(function: Any) -> list[str]:
    """Return the parameters of a function; the keys of a TypedDict in place of its ``**kwargs``."""
    found = []
    for each in inspect.signature(function).parameters.values():
        if each.kind is each.VAR_KEYWORD and hasattr(each.annotation, "__args__"):
            found += [*get_type_hints(each.annotation.__args__[0])]
        elif each.kind is each.VAR_KEYWORD and each.annotation in ("Any", Any):
            found.append(f"**{each.name}")
        elif each.name not in ("self", "cls"):
            found.append(each.name)
    return found


def signatures(name: str, value: Any) -> Iterator[tuple[str, list[str], int]]:
    """Yield what can be called or declared: its name, what it takes, and the limit."""
    fields = getattr(value, "model_fields", None)
    if inspect.ismodule(value) or (inspect.isclass(value) and issubclass(value, BaseException)):
        return
    if fields is not None or dataclasses.is_dataclass(value):
        own = fields or value.__dataclass_fields__
        yield name, [each for each in own if not each.startswith("_")], MAX_FIELDS
    elif callable(value):
        yield name, parameters(value), MAX_PARAMETERS
    members = value if inspect.isclass(value) else type(value)
    if not members.__module__.startswith("vane_dagster"):
        return
    for each, member in inspect.getmembers(members, inspect.isfunction):
        if not each.startswith("_") and member.__module__.startswith("vane_dagster"):
            yield f"{name}.{each}", parameters(member), MAX_PARAMETERS


def public_things() -> list[str]:
    """Return a line for each thing that users may rely on, sorted."""
    places = [("vd", vd, public_names())]
    places += [(each.__name__, each, [*each.__all__]) for each in (checks, sources, testing)]
    values = {f"{place}.{name}": getattr(of, name) for place, of, names in places for name in names}
    known = {each for each in values.values() if inspect.isclass(each)}
    lines = [line for name, value in values.items() for line in _things(name, value, known)]
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and kind.__module__ == errors.__name__ and name[0] != "_":
            lines.append(f"vd.errors.{name} is a {', '.join(b.__name__ for b in kind.__bases__)}")
    lines += _command(click.Context(cli), cli, "vane-dagster")
    entries = re.findall(r"^\| (`[^|]*`) \|", _page("metadata.md").partition("details")[0], re.M)
    lines += [f"metadata {name}" for entry in entries for name in re.findall(r"`([^`]+)`", entry)]
    documented = {name for page in (ROOT / "docs").rglob("*.md") for name in _variables(page)}
    read = {name for file in (ROOT / "vane_dagster").rglob("*.py") for name in _variables(file)}
    return sorted({*lines, *(f"environment variable {name}" for name in documented & read)})


def _things(name: str, value: Any, known: Set[type] = frozenset()) -> Iterator[str]:
    """Yield a line for a name, and for each of its parameters, fields, methods and properties.

    Args:
        name: The name.
        value: What it names.
        known: Public classes, whose members are not repeated for their subclasses.
    """
    yield name
    if inspect.ismodule(value) or (inspect.isclass(value) and issubclass(value, BaseException)):
        return
    taken = {}
    if (models := getattr(value, "model_fields", None)) is not None:
        for field, info in models.items():
            given = info.get_default(call_default_factory=True)
            taken[field] = ", required" if info.is_required() else f" = {_default(given)}"
    elif inspect.isclass(value) or inspect.isroutine(value):
        taken = dict(_parameters(value))
    yield from (f"{name}: {each}{how}" for each, how in taken.items())
    for field in getattr(value, "__dataclass_fields__", {}).keys() - taken.keys():
        if not field.startswith("_"):
            yield f"{name}.{field}"
    members = value if inspect.isclass(value) else type(value)
    if not members.__module__.startswith(vd.__name__):
        return
    bases = known & {*members.__mro__[1:]}
    for each, member in inspect.getmembers(members):
        is_property = isinstance(member, (property, functools.cached_property))
        function = getattr(member, "fget", None) or getattr(member, "func", member)
        home = getattr(function, "__module__", None) or ""
        is_own = inspect.isroutine(function) and home.startswith(vd.__name__)
        is_shown = not each.startswith("_") or each == "__call__"
        if is_own and is_shown and not any(hasattr(base, each) for base in bases):
            yield f"{name}.{each}"
            given = {} if is_property else dict(_parameters(function))
            yield from (f"{name}.{each}: {one}{how}" for one, how in given.items())


def _parameters(function: Any) -> Iterator[tuple[str, str]]:
    """Yield each parameter, with its position if it may be given by it, and its default."""
    every = full_signature(function).parameters.values()
    taken = [each for each in every if each.name != "self" and not each.name.startswith("_")]
    for position, each in enumerate(taken, 1):
        stars = "*" * (1 + (each.kind is each.VAR_KEYWORD)) * (each.kind in _STARRED)
        by_position = each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        how = f", position {position}" if by_position else ""
        if not stars:  # annotations may become more precise
            how += ", required" if each.default is each.empty else f" = {_default(each.default)}"
        yield f"{stars}{each.name}", how


def _default(value: Any) -> str:
    """Write a default without addresses."""
    text = value.__qualname__ if inspect.isclass(value) else repr(value)
    return type(value).__name__ if " at 0x" in text else text


def _command(context: click.Context, command: click.Command, path: str) -> Iterator[str]:
    """Yield a line for a command, and for each of its arguments, options and subcommands."""
    yield path
    for each in command.params:
        names = each.opts + each.secondary_opts
        shown = each.human_readable_name if isinstance(each, click.Argument) else ", ".join(names)
        yield f"{path}: {shown}" + (", required" if each.required else "")
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from _command(context, found, f"{path} {name}")


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def _variables(file: Path) -> set[str]:
    return set(re.findall(r"\bVANE_DAGSTER_[A-Z_]+", file.read_text(encoding="utf-8")))


def differences(recorded: list[str], found: list[str]) -> str:
    """Describe what differs from the record; empty if nothing does."""
    names = {line.partition(":")[0] for line in recorded}
    added = sorted({*found} - {*recorded})
    gone = sorted({*recorded} - {*found})
    # A new parameter that has to be given breaks the calls that there are.
    broken = [
        each for each in added if each.endswith(", required") and each.partition(":")[0] in names
    ]
    gone += [f"{each} (new)" for each in broken]
    parts = [(POLICY, gone), (ADDED, [each for each in added if each not in broken])]
    return "".join(
        text.format(lines="\n".join(f"  {each}" for each in lines))
        for text, lines in parts
        if lines
    )


def main(check: bool, record: bool) -> int:
    """Print the API.

    Args:
        check: Whether to return 1 if a limit is exceeded or the record differs.
        record: Whether to write the record.
    """
    if record:
        RECORD.write_text("\n".join(public_things()) + "\n", encoding="utf-8")
    names, beyond = public_names(), 0
    print(f"{len(names)} names, at most {MAX_NAMES}")
    beyond += len(names) > MAX_NAMES
    for name in names:
        for shown, taken, limit in signatures(name, getattr(vd, name)):
            is_hidden = inspect.isclass(getattr(vd, name)) and "**" in "".join(taken)
            is_beyond = len(taken) > limit or is_hidden
            beyond += is_beyond
            print(f"{'!' if is_beyond else ' '} {len(taken):2} {shown}({', '.join(taken)})")
    recorded = RECORD.read_text(encoding="utf-8").splitlines()
    differ = differences(recorded, public_things()) if check else ""
    if differ:
        print(f"{RECORD.relative_to(ROOT)} differs from the API.{differ}", file=sys.stderr)
    return 1 if check and (beyond or differ) else 0


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="fail beyond the limits")
    arguments.add_argument("--record", action="store_true", help="write tools/api.txt")
    options = arguments.parse_args()
    sys.exit(main(options.check, options.record))
