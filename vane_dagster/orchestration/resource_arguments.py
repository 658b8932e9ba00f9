"""A check of the arguments of resources: Dagster ignores those that a resource does not declare."""

from typing import Any

from vane_dagster._keywords import unknown_arguments
from vane_dagster.errors import DefinitionError


class DeclaredArguments:
    """Base of resources that refuse arguments other than their fields. It precedes Dagster's."""

    def __init__(self, **arguments: Any) -> None:
        fields = getattr(type(self), "model_fields", {})
        aliases = {each.alias for each in fields.values()}
        if unknown := [name for name in arguments if name not in fields and name not in aliases]:
            method = f"vd.{type(self).__name__}"
            raise DefinitionError("\n".join(unknown_arguments(method, unknown, fields)))
        super().__init__(**arguments)
