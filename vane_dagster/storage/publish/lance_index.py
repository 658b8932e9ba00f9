"""The vector index of a published Lance table: its declaration, and its upkeep."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from vane_dagster import retries
from vane_dagster._arguments import one_of, positive
from vane_dagster._keywords import require_columns
from vane_dagster.errors import DefinitionError, SchemaError, names

METRICS = ("cosine", "l2", "dot")
TYPES = (
    "IVF_PQ", "IVF_FLAT", "IVF_SQ", "IVF_RQ", "IVF_HNSW_FLAT", "IVF_HNSW_SQ", "IVF_HNSW_PQ",
)  # fmt: skip
MIN_ROWS = 256
"""Fewer vectors cannot train an index, and are searched exactly without one."""
_MAX_SEGMENTS = 8
_GROWTH = 4
_CONFIG = "vane_dagster.index."


@dataclass(frozen=True)
class VectorIndex:
    """A vector index as `write` declares it.

    Attributes:
        column: The column of vectors.
        metric: The distance: "cosine", "l2" or "dot".
        type: Lance's type of the index.
        num_partitions: Partitions of the index; None for Lance's own number.
        num_sub_vectors: Sub-vectors of product quantization; None for a number that divides the
            dimension.
    """

    column: str
    metric: str = "l2"
    type: str = "IVF_PQ"
    num_partitions: int | None = None
    num_sub_vectors: int | None = None

    @classmethod
    def parse(cls, given: Any, where: str) -> VectorIndex:
        """Validate the argument ``index`` of `write`."""
        try:
            index = cls(**given)
        except TypeError:
            raise DefinitionError(
                f"{where}: index is {given!r}; expected a dict with the column of vectors, such as "
                "index={'column': 'embedding', 'metric': 'cosine'}; known are "
                f"{names(cls.__dataclass_fields__)}"
            ) from None
        one_of(where, "metric of the index", index.metric, METRICS)
        one_of(where, "type of the index", index.type, TYPES)
        positive(where, "num_partitions of the index", index.num_partitions)
        positive(where, "num_sub_vectors of the index", index.num_sub_vectors)
        if index.num_sub_vectors and not index.type.endswith("PQ"):
            raise DefinitionError(
                f"{where}: num_sub_vectors is for an index with product quantization, and "
                f"{index.type!r} has none; leave it out, or set type='IVF_PQ'"
            )
        return index

    @property
    def declared(self) -> dict[str, Any]:
        """The arguments that were given or have a default, as plain values."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def require(self, schema: pa.Schema, location: str) -> None:
        """Check the indexed column of a table's schema."""
        require_columns(f"{location}: index: the table", [self.column], schema.names, SchemaError)
        kind = schema.field(self.column).type
        if not pa.types.is_fixed_size_list(kind) or not pa.types.is_floating(kind.value_type):
            raise SchemaError(
                f"{location}: index: column {self.column!r} is {kind}, and an index needs vectors "
                "of one length; declare the column as pa.list_(pa.float32(), dimension), or cast "
                "it to FLOAT[dimension] in a project"
            )
        if self.num_sub_vectors and kind.list_size % self.num_sub_vectors:
            raise SchemaError(
                f"{location}: index: num_sub_vectors is {self.num_sub_vectors}, which does not "
                f"divide the {kind.list_size} dimensions of column {self.column!r}"
            )

    def update(self, table: Any) -> None:
        """Bring the index up to date with a version of a table.

        New rows become a segment beside the others; the ninth segment is merged with them. The
        index is trained again when the table has four times the rows of the last training, or if
        it was declared otherwise; it is then dropped if it cannot be trained.
        """
        rows = table.count_rows()
        segments = [
            segment
            for index in table.describe_indices()
            if index.name == _index_name(self.column)
            for segment in index.segments
        ]
        trained = json.loads(table.config().get(f"{_CONFIG}{self.column}", "{}"))
        is_same = trained.get("declared") == self.declared
        if not segments or not is_same or rows >= _GROWTH * trained["rows"]:
            if not self._train(table) and segments and not is_same:
                _drop(table, self.column)
            return
        if rows < self._min_rows:
            return
        indexed = {id for segment in segments for id in segment.fragment_ids}
        if any(f.fragment_id not in indexed for f in table.get_fragments()):
            table.optimize.optimize_indices(
                index_names=[_index_name(self.column)],
                num_indices_to_merge=len(segments) if len(segments) >= _MAX_SEGMENTS else 0,
            )

    def _train(self, table: Any) -> bool:
        """Make the index; False if there are too few vectors."""
        rows = table.count_rows(f"`{self.column}` IS NOT NULL")
        if rows < self._min_rows:
            return False
        given: dict[str, Any] = {}
        if self.type.endswith("PQ"):
            dimension = table.schema.field(self.column).type.list_size
            given["num_sub_vectors"] = self.num_sub_vectors or _sub_vectors(dimension)
        if self.num_partitions:
            given["num_partitions"] = self.num_partitions
        table.create_index(
            self.column,
            self.type,
            name=_index_name(self.column),
            metric=self.metric,
            replace=True,
            **given,
        )
        record = json.dumps({"declared": self.declared, "rows": rows})
        table.update_config({f"{_CONFIG}{self.column}": record})
        return True

    @property
    def _min_rows(self) -> int:
        return max(MIN_ROWS, self.num_partitions or 0)


def update_index(table: Any, declared: VectorIndex | None) -> None:
    """Bring the indexes of a table up to date, after a publication.

    Indexes made by this package that are no longer declared are dropped; others are left as they
    are. Rows without an index are searched exactly, so an interrupted update loses nothing.
    """
    for attempt in retries.transactions():
        try:
            for name in table.config():
                column = name.removeprefix(_CONFIG)
                if column != name and (declared is None or column != declared.column):
                    _drop(table, column)
            if declared is not None:
                declared.update(table)
            return
        except Exception as error:  # the driver has no class of its own for all conflicts
            if "conflict" not in str(error).lower() or attempt == retries.TRANSACTION_ATTEMPTS:
                raise
        table.checkout_latest()


def _drop(table: Any, column: str) -> None:
    """Drop the index of a column, if it exists, and then the record of its training."""
    name = _index_name(column)
    if any(index.name == name for index in table.describe_indices()):
        table.drop_index(name)
    if f"{_CONFIG}{column}" in table.config():
        table.delete_config_keys([f"{_CONFIG}{column}"])


def _index_name(column: str) -> str:
    """Return the name that Lance itself would give."""
    return f"{column}_idx"


def _sub_vectors(dimension: int) -> int:
    """Return a number of sub-vectors: of 16 dimensions if there are at least 8 of them."""
    for size in (16, 8, 4, 2):
        if dimension % size == 0 and dimension // size >= 8:
            return dimension // size
    return dimension
