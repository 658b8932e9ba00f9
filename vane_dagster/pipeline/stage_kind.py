"""What all kinds of stages have in common, and the columns of a node."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from vane_dagster._keywords import require_columns
from vane_dagster.errors import SchemaError
from vane_dagster.fingerprint.local_file import FileContent, LocalFile
from vane_dagster.pipeline.keys import Keys
from vane_dagster.pipeline.options import IncludeColumns
from vane_dagster.pipeline.records import Asset, Failures, Reuse
from vane_dagster.storage.manifest import Component
from vane_dagster.types.kinds import is_text

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline
    from vane_dagster.providers.template import Template
    from vane_dagster.providers.usage import UsageAccount
    from vane_dagster.storage.publish.base import Publisher

SOURCE = "source"
"""The name of a pipeline's source among its nodes. A node is a stage or the source."""
KIND = "kind"
"""The component of a definition with the kind of its stage."""
Schemas = Mapping[str, pa.Schema]
"""Schemas by node."""
Column = tuple[str, str]
"""A node and one of its columns."""
_NO_FAILURES = Failures("raise")
_REUSED = Reuse("fragments")


@dataclass(frozen=True)
class Table:
    """The columns of a node, as far as they are known.

    Attributes:
        fields: The columns; None where only the source knows the type.
        reads: The columns of the upstream nodes that the values of each column depend on.
        is_complete: Whether these are all columns, rather than those known without the source.
    """

    fields: Mapping[str, pa.Field | None]
    reads: Mapping[str, list[Column]] = field(default_factory=dict)
    is_complete: bool = True

    @property
    def schema(self) -> pa.Schema | None:
        """The schema; None if a column or its type is not known."""
        known = [each for each in self.fields.values() if each is not None]
        return pa.schema(known) if self.is_complete and len(known) == len(self.fields) else None


@dataclass(frozen=True)
class StageKind(abc.ABC):
    """The properties that all stages share, with the defaults of most kinds.

    Attributes:
        name: The stage's name.
        upstream: The nodes that it reads.
        asset: Options of its Dagster asset.
        failures: How failed calls and rows are handled.
        reuse: Which stored results are used again.
        row_order: The template of the prompts by which a fragment's rows are sorted; None for none.
            Only set if it lists the columns that it reads.
        is_inferred: Whether the first run infers the schema. `MapBatchesSpec.with_schema` returns
            the stage with the inferred one.
        runs_udf: Whether it runs user code or calls a model, in workers of a pool.
        publishes: Whether it ends a branch and writes its rows where any tool can read them.
    """

    name: str
    upstream: tuple[str, ...]
    asset: Asset
    failures: Failures = field(default=_NO_FAILURES, kw_only=True)
    reuse: Reuse = field(default=_REUSED, kw_only=True)
    row_order: Template | None = field(default=None, kw_only=True)
    is_inferred: bool = field(default=False, kw_only=True)

    runs_udf: ClassVar[bool]
    publishes: ClassVar[bool]

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """Name of the kind, in keys, manifests and Dagster."""

    # Rows.

    @property
    def makes_rows(self) -> bool:
        """Whether one row may become many, under new ids."""
        return False

    @property
    def may_filter(self) -> bool:
        """Whether it may drop rows."""
        return False

    def base_node(self, pipeline: Pipeline) -> str:
        """Return the node that determines its output rows."""
        return self.upstream[0]

    def row_keys(self, pipeline: Pipeline) -> Keys:
        """Return the columns that identify its rows, the id first."""
        return pipeline._keys_of(self.upstream[0])

    def publisher(self, partition: str | None) -> Publisher | None:
        """Return the publisher of a partition; None for a stage that publishes nothing."""
        return None

    # Failed rows.

    @property
    def isolates_rows(self) -> bool:
        """Whether it isolates single rows that fail or end their workers."""
        return self.failures.on_error != "raise"

    @property
    def quarantines(self) -> bool:
        """Whether failed rows are quarantined beside its parts."""
        return self.failures.on_error == "quarantine"

    def quarantining(self, pipeline: Pipeline) -> dict[str, list[str]]:
        """Map each of its list columns to the stages with quarantined rows that would add to it."""
        return {}

    def why_by_fragment(self, pipeline: Pipeline) -> str:
        """Return why rows are not reused one by one, and the fix; empty for nothing to fix."""
        return ""

    # Columns.

    @abc.abstractmethod
    def outputs(self, pipeline: Pipeline, inputs: Mapping[str, Table]) -> Table:
        """Return its columns."""

    def output_schema(self, pipeline: Pipeline, inputs: Schemas) -> pa.Schema:
        """Return the schema of its rows."""
        schema = self.outputs(pipeline, _tables(inputs)).schema
        assert schema is not None
        return schema

    def column_lineage(self, pipeline: Pipeline, schemas: Schemas) -> dict[str, list[Column]]:
        """Map each of its columns to the columns that its values depend on."""
        inputs = {node: schemas[node] for node in self.upstream}
        reads = self.outputs(pipeline, _tables(inputs)).reads
        return {name: reads[name] for name in schemas[self.name].names}

    def made_schema(self, pipeline: Pipeline) -> pa.Schema | None:
        """Return the columns with values that are in no input, such as the nulls of a left join.

        None if the declaration does not determine which they are.
        """
        return pa.schema([])

    def measured_columns(self, pipeline: Pipeline, schema: pa.Schema) -> tuple[str, ...]:
        """Return the columns whose statistics are stored with each part, for checks.

        All but the ids, or none if the stage only passes columns on.
        """
        ids = {*pipeline._key_columns(self.name)}
        is_measured = self.made_schema(pipeline) != pa.schema([])
        return tuple(name for name in schema.names if is_measured and name not in ids)

    def columns_read(
        self, upstream: str, schema: pa.Schema, ids: Sequence[str]
    ) -> tuple[str, ...] | None:
        """Return the columns that it needs from an upstream node; None for all."""
        return None

    # Fragment keys, usage and description.

    @abc.abstractmethod
    def components(self, pipeline: Pipeline) -> Sequence[Component]:
        """Return everything that changes its results besides kind and id.

        See `planning.definition.stage_definition`.
        """

    def texts(self, pipeline: Pipeline) -> Mapping[str, str]:
        """Return code and options that are part of its definition, for people."""
        return {}

    def local_files(self) -> Mapping[LocalFile, FileContent]:
        """Return the local files among its arguments, with their present contents."""
        return {}

    @property
    def description(self) -> str | None:
        """A description of the stage for users."""
        return None

    @property
    def usage(self) -> UsageAccount | None:
        """The usage of a model's answers, with its budgets; None if the stage has none."""
        return None


def named_in(include: IncludeColumns) -> tuple[str, ...]:
    """Return the columns that `include` names."""
    return () if include is True else include


def _tables(schemas: Schemas) -> dict[str, Table]:
    """Return nodes whose columns are all known."""
    return {node: Table(dict(zip(schema.names, schema))) for node, schema in schemas.items()}


def with_upstream(pipeline: Pipeline, node: str) -> set[str]:
    """Return a node and all nodes upstream of it."""
    above = () if node == SOURCE else pipeline[node].spec.upstream
    return {node}.union(*(with_upstream(pipeline, upstream) for upstream in above))


def check_id(location: str, id: str, schema: pa.Schema) -> None:
    """Validate the id column of a schema."""
    fix = "Name the id column in vd.Pipeline(id=...)"
    require_columns(location, [id], schema.names, fix=fix)
    kind = schema.field(id).type
    if not (pa.types.is_integer(kind) or is_text(kind)):
        raise SchemaError(
            f"{location}: the id {id!r} has the type {kind}; expected whole numbers or text. "
            "Cast it in the source, for example to VARCHAR, or write "
            f"id={{'{id}_id': [{id!r}]}}"
        )
