"""The result of a preview: computed rows, failed ones in their places, and what they took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from vane_dagster._texts import Printed, amount, count, duration, table
from vane_dagster.storage.sample import short_text, short_texts

_WIDTH = 40
_SHORT = _WIDTH, 17


@dataclass(frozen=True)
class FailedRow:
    """A row that could not be computed.

    Attributes:
        id: Its id.
        stage: The stage in which it failed.
        error: The class of the error, and its message.
    """

    id: Any
    stage: str
    error: str


@dataclass(frozen=True)
class StageCost:
    """What a preview took to compute a stage.

    Attributes:
        stage: The stage.
        rows: Input rows that were computed.
        seconds: Seconds that all workers took together, without loading the model.
        load_seconds: Seconds in which a worker loaded the model; None if it was loaded before.
        tokens: Tokens of prompts and answers; None for a stage without prompts.
        cost: Their price; None without prices.
    """

    stage: str
    rows: int
    seconds: float
    load_seconds: float | None = None
    tokens: int | None = None
    cost: float | None = None

    def __str__(self) -> str:
        text = f"{self.stage}: {count(self.rows, 'row')} in {duration(self.seconds)}"
        if self.rows and self.seconds > 0:
            text += f", {amount(self.rows / self.seconds)} rows/s of a worker"
        if self.load_seconds is not None:
            text += f"; {duration(self.load_seconds)} to load the model"
        if self.tokens is not None:
            text += f"; {count(self.tokens, 'token')}"
        if self.cost is not None:
            text += f"; a price of {amount(self.cost)}"
        return text


@dataclass(frozen=True, repr=False)
class Preview(Printed):
    """Some rows of a stage, computed and not stored. It prints itself.

    pandas, Polars, DuckDB and Arrow read it as a table of the rows that were computed.

    Attributes:
        stage: As "docs/embedding".
        table: The rows that were computed.
        failed: The input rows that failed, and those that failed upstream.
        costs: What each stage took, upstream first. Stages that were read from the store have none.
        input_ids: The ids of the input rows, in their order.
        id: The column of `table` with the id of the input row.
    """

    stage: str
    table: pa.Table
    failed: Sequence[FailedRow]
    costs: Sequence[StageCost]
    input_ids: Sequence[Any]
    id: str

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.table.__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def places(self) -> Iterator[int | FailedRow]:
        """Yield the row's index in `table`, or the failure, in the order of the input."""
        owners = self.table.column(self.id).to_pylist()
        rows: dict[Any, list[int]] = {}
        for place, owner in enumerate(owners):
            rows.setdefault(owner, []).append(place)
        failed = {each.id: each for each in self.failed if each.stage == self._name}
        for id in dict.fromkeys([*self.input_ids, *owners, *failed]):
            yield from rows.get(id, ())
            if id in failed:
                yield failed[id]
        yield from (each for each in self.failed if each.stage != self._name)

    @property
    def _name(self) -> str:
        return self.stage.rpartition("/")[2]

    def cells(self) -> list[list[str]]:
        """Return the table as short texts, its header first; errors are in the last column."""
        names = self.table.column_names
        values = [short_texts(column, *_SHORT) for column in self.table.columns]
        rows = [[*names, "error"] if self.failed else names]
        for place in self.places():
            if isinstance(place, FailedRow):
                where = "" if place.stage == self._name else f"in {place.stage}: "
                shown = self.id if self.id in names else names[0]
                own = [short_text(place.id, *_SHORT) if name == shown else "" for name in names]
                rows.append([*own, short_text(where + place.error, _WIDTH)])
                continue
            error = [""] if self.failed else []
            rows.append([*(column[place] for column in values), *error])
        return rows

    def __str__(self) -> str:
        return "\n".join([table(self.cells()), "", *map(str, self.costs)])
