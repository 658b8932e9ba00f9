"""Options of a stage's Dagster asset: the arguments of a stage that are not its own.

Workers import `pipeline.options`, but nothing of this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vane_dagster.errors import DefinitionError
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
    known = tuple(AssetOptions.__dataclass_fields__)
    if unknown := {name: value for name, value in options.items() if name not in known}:
        raise DefinitionError(f"{location}: {unknown_arguments(call, unknown, known)}")
    return AssetOptions(**options)
