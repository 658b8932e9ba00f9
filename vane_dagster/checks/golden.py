"""Comparison of rows with expected rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._keywords import require_columns
from vane_dagster.checks.base import ANY, Check
from vane_dagster.checks.comparison import as_metadata, described, differences_of
from vane_dagster.checks.context import CheckOutcome
from vane_dagster.errors import DefinitionError, SchemaError, names
from vane_dagster.types.tensors import is_tensor, unsliced
from vane_dagster.types.to_arrow import to_arrow

if TYPE_CHECKING:
    from vane_dagster.checks.partition import CheckContext


@dataclass(frozen=True)
class Golden(Check):
    """Expected outputs of some rows.

    A partition may have some of the ids or none; an unpartitioned stage must have all of them.

    Attributes:
        expected: A `pyarrow.Table`, or lists by column: the id and the columns to compare.
        tolerance: The largest difference of floating-point numbers, also inside of other values,
            relative to one plus their magnitude. All other values must be equal.
    """

    expected: pa.Table | Mapping[str, Any] = field(hash=False)
    tolerance: float = field(default=1e-6, kw_only=True)

    _bounds: ClassVar[Mapping[str, float]] = {"tolerance": ANY}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(expected=self._parsed())

    @property
    def rows(self) -> pa.Table:
        """The expected rows."""
        assert isinstance(self.expected, pa.Table)
        return self.expected

    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Compare the rows that have the expected ids.

        Raises:
            SchemaError: If columns or types do not fit, or expected ids are null or repeated.
        """
        id, schema = context.id, context.schema
        columns = _columns(self, id, schema)
        ids = _ids(self.rows, id, schema)
        actual = context.lookup(ids, columns)
        stored_ids = actual.column(id).to_pylist()
        expected = unsliced(self.rows).take(pc.index_in(actual.column(id), value_set=ids))
        for place, name in enumerate(expected.column_names):
            wanted, given = expected.column(name), schema.field(name).type
            is_fraction = pa.types.is_floating(wanted.type) and pa.types.is_integer(given)
            if not is_fraction:
                expected = expected.set_column(place, name, _cast(wanted, given, name))
        differences = [*differences_of(stored_ids, expected, actual, columns, self.tolerance)]
        metadata: dict[str, Any] = {"expected": len(ids), "found": len(stored_ids)}
        metadata |= as_metadata(differences, "expected", "actual")
        if differences:
            return CheckOutcome(
                False, described(differences, len(stored_ids), "expected values"), metadata
            )
        text = f"{len(stored_ids):,} of {len(ids):,} expected ids are in the output"
        if context.partition is None and len(stored_ids) < len(ids):
            return CheckOutcome(False, f"{text}; expected all of them", metadata)
        end = (
            ", and their rows match the expected values"
            if stored_ids
            else ", so nothing was compared"
        )
        return CheckOutcome(True, f"{text}{end}", metadata)

    @property
    def description(self) -> str:
        return f"Rows with known ids match the expected values within {self.tolerance:g}"

    def fit(self, schema: pa.Schema, location: str) -> None:
        self._require(schema, location, self.rows.column_names)

    def _parsed(self) -> pa.Table:
        table = self.expected
        if not isinstance(table, pa.Table):
            try:
                table = pa.table(dict(table))
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise DefinitionError(
                    f"{self._location}: expected is a {type(self.expected).__name__}, not a table "
                    f"({error}); give a pyarrow.Table or lists of equal length by column, such as "
                    '{"id": [1, 2], "label": ["a", "b"]}'
                ) from None
        if not table.num_rows or table.num_columns < 2:
            raise DefinitionError(
                f"{self._location}: expected has {table.num_rows} rows and the columns "
                f"{names(table.column_names)}; give the id and expected values of at least one row"
            )
        return table.replace_schema_metadata(None)


def _columns(check: Golden, id: str, schema: pa.Schema) -> list[str]:
    """Return the columns to compare."""
    expected = check.rows.column_names
    columns = [name for name in expected if name != id]
    require_columns("the expected table", (id,), expected)
    require_columns("the stage", columns, schema.names)
    return columns


def _ids(expected: pa.Table, id: str, schema: pa.Schema) -> pa.Array:
    ids = _cast(expected.column(id), schema.field(id).type, id).combine_chunks()
    if ids.null_count or pc.count_distinct(ids).as_py() != len(ids):
        raise SchemaError(f"the expected ids in {id!r} are null or repeated; give each id once")
    return ids


def _cast(column: pa.ChunkedArray, kind: pa.DataType, name: str) -> pa.ChunkedArray:
    try:
        return to_arrow(column, kind) if is_tensor(kind) else column.cast(kind)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SchemaError(
            f"column {name!r} is {kind}; the expected values are {column.type}: {error}"
        ) from None
