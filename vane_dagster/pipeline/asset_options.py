"""Options of a stage's Dagster asset: the arguments of a stage that are not its own.

Workers import `pipeline.options`, but nothing of this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vane_dagster.errors import DefinitionError, names
from vane_dagster.pipeline.foreign_arguments import StageCall, unknown_arguments


@dataclass(frozen=True)
class AssetOptions:
    """Options of a stage's Dagster asset that the user declares; see `dg.AssetSpec`."""

    description: str | None = None
    group_name: str | None = None
    owners: Sequence[str] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    kinds: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    deps: Sequence[Any] = ()
    automation_condition: Any = None
    freshness_policy: Any = None
    checks: Sequence[Any] = ()


def asset_options(location: str, options: Mapping[str, Any], call: StageCall) -> AssetOptions:
    """Parse the arguments of a stage that configure its Dagster asset.

    Args:
        location: The stage, for messages.
        options: The keyword arguments that are not the stage's own.
        call: The method that adds the stage, for messages.

    Raises:
        DefinitionError: If an argument is unknown. The message has the line to write in its place.
    """
    check_arguments(location, options, call)
    return AssetOptions(**options)


def check_arguments(location: str, given: Mapping[str, Any], call: StageCall) -> None:
    """Check that arguments are those of a method, or configure the Dagster asset of its stage.

    Args:
        location: The stage, for messages.
        given: Keyword arguments; those that the call itself declares may be among them.
        call: The method that adds the stage.

    Raises:
        DefinitionError: If an argument is unknown. The message has the line to write in its place.
    """
    if text := _unknown(given, call):
        raise DefinitionError(f"{location}: {text}")


def missing_arguments(missing: Sequence[str], given: Mapping[str, Any], call: StageCall) -> str:
    """Describe required arguments that are missing, after unknown ones that may be meant for them.

    Args:
        missing: The arguments that are missing.
        given: The keyword arguments of the call.
        call: The method that adds the stage.
    """
    text = f"{call.method} lacks its argument{'s' * (len(missing) > 1)} {names(missing)}"
    if "schema" in missing:
        text += (
            '. Declare the columns of the results, as schema={"label": "VARCHAR"}, or write '
            'schema="infer", which infers them from the first rows'
        )
    return "\n".join(line for line in (_unknown(given, call), text) if line)


def _unknown(given: Mapping[str, Any], call: StageCall) -> str:
    known = tuple(AssetOptions.__dataclass_fields__)
    unknown = {n: v for n, v in given.items() if n not in known and n not in call.options}
    return unknown_arguments(call, unknown, known) if unknown else ""
