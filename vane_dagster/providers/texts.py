"""Model tasks that process each text of a column independently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pyarrow as pa

from vane_dagster.errors import RowErrors


@dataclass(frozen=True)
class TextTask:
    """A model task for each text of a column.

    Attributes:
        column: The text column. A null is a row error.
        output: The output column.
    """

    column: str
    output: str

    order = None
    classes = ()
    functions = ()
    preloaded = ()
    usage = None
    contents = ()
    features: ClassVar[Mapping[str, str]] = {}
    declared_sampling: ClassVar[Mapping[str, Any]] = {}

    @property
    def reads(self) -> tuple[str, ...]:
        """The text column."""
        return (self.column,)

    @property
    def needed(self) -> tuple[str, ...]:
        """All columns that it reads."""
        return self.reads

    def keyed(self, include: Any) -> Mapping[str, Any]:
        """Return the values that change the output, in the frozen order of the fields."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        head = {"column": own.pop("column"), "output_column": own.pop("output")}
        return {**head, **own, "include_columns": include}

    async def query(self, provider: Any, texts: list[str]) -> Any:
        """Return a result for each text."""
        raise NotImplementedError

    def refused(self, answers: Any) -> Mapping[int, BaseException]:
        """Return the errors of results that are invalid, by their place."""
        return {}

    def made(self, answers: Any) -> Mapping[str, Any]:
        """Convert the results to the output columns."""
        raise NotImplementedError

    async def run(self, provider: Any, batch: pa.Table) -> Mapping[str, Any]:
        """Process the texts of a batch together."""
        texts = batch.column(self.column).to_pylist()
        errors: dict[int, BaseException] = {
            place: ValueError(f"column {self.column!r} is {_shown(text)}; expected a text")
            for place, text in enumerate(texts)
            if not isinstance(text, str)
        }
        kept = [place for place in range(len(texts)) if place not in errors]
        try:
            answers = await self.query(provider, [texts[place] for place in kept]) if kept else []
        except RowErrors as error:
            errors |= {kept[place]: failed for place, failed in error.errors.items()}
            kept = [place for place in kept if place not in errors]
            answers = error.rows
        if refused := self.refused(answers) if kept else None:
            errors |= {kept[place]: wrong for place, wrong in refused.items()}
            answers = [one for place, one in enumerate(answers) if place not in refused]
            kept = [place for place in kept if place not in errors]
        if errors:
            raise RowErrors(dict(sorted(errors.items())), self.made(answers) if kept else None)
        return self.made(answers)


def _shown(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
