"""A check of the arguments of resources: Dagster ignores those that a resource does not declare."""

from typing import Any, ClassVar

from vane_dagster._keywords import unknown_arguments
from vane_dagster.errors import DefinitionError, names


class DeclaredArguments:
    """Base of resources that refuse arguments other than their fields. It precedes Dagster's."""

    arguments_elsewhere: ClassVar[dict[str, str]] = {}
    """Arguments of related resources, and these resources."""

    def __init__(self, *values: Any, **arguments: Any) -> None:
        fields = getattr(type(self), "model_fields", {})
        method = f"vd.{type(self).__name__}"
        if values:
            raise DefinitionError(
                f"{method} takes its arguments by name: {names(fields, 20)}. Write "
                f"{method}({next(iter(fields), 'name')}=...)"
            )
        aliases = {each.alias for each in fields.values()}
        if unknown := [name for name in arguments if name not in fields and name not in aliases]:
            written = {
                name: f"write {name}=... at {resource}"
                for name, resource in self.arguments_elsewhere.items()
            }
            raise DefinitionError("\n".join(unknown_arguments(method, unknown, fields, written)))
        super().__init__(**arguments)
