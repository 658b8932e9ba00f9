"""The public `Pipeline`: what a user declares, and the Dagster assets that are built of it.

Importing this module or declaring a pipeline does not import Dagster; building its assets does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vane_dagster.errors import DefinitionError
from vane_dagster.pipeline import pipeline as declared
from vane_dagster.pipeline.options import asset_options
from vane_dagster.pipeline.specs import SOURCE

if TYPE_CHECKING:
    import dagster as dg
    import pyarrow as pa


class Pipeline(declared.Pipeline):
    """A DAG of stages over one partitioned source, keyed by one id column.

    Args:
        name: First part of the stages' asset keys.
        source: Where the rows come from: `parquet` files, a stage of another pipeline, an ordinary
            asset whose rows are in the store, or `stored` with the key of one.
        id: A column that is unique and not null inside a partition; every stage keeps it.
        partitions_def: A Dagster partitions definition; none for an unpartitioned pipeline.
        backfill_policy: How Dagster cuts a backfill into runs. Default: one run for all
            partitions, which share their warm models.
        fragment_rows: Rows of a fragment, at most. Default: from the stages' batch sizes, decided
            in the first run and kept in the store.
        group_name: Dagster group of the stages that name none.
        pool: Dagster concurrency pool of the step.
        retry_policy: Dagster retry policy of the step.
        op_tags: Dagster tags of the step.

    Raises:
        DefinitionError: If an argument does not fit.
    """

    def source_schema(self) -> pa.Schema:
        """The source's columns and types, from the last of its files.

        Raises:
            SourceError: If there is no file, or none whose footer can be read.
            DefinitionError: If the rows are another asset's, in a store.
        """
        return self.source.schema(f"pipeline {self.name!r}")

    def build_assets(self) -> dg.AssetsDefinition:
        """The pipeline as one Dagster `multi_asset`, any subset of whose stages can be selected.

        Its resources are ``compute`` (`RayCompute` or `LocalCompute`) and ``store``
        (`FragmentStore`).

        Raises:
            DefinitionError: If there are no stages, or code has no identity.
        """
        from vane_dagster.orchestration.assets import build_assets

        return build_assets(self)

    def build_source(self, **asset: Any) -> dg.AssetsDefinition:
        """The source as a Dagster asset, ``<pipeline>/source``, that is observed.

        An observation lists the source once and reports each partition whose files are new, gone or
        changed, from which Dagster knows what is outdated and automation conditions know what to
        run. A run of the pipeline reports what it finds too.

        Args:
            **asset: What `dg.AssetSpec` takes; see `project`. An ``automation_condition`` such as
                ``AutomationCondition.on_cron`` says when to observe.

        Raises:
            DefinitionError: If the source is another asset, or names the one that writes it:
                that one reports itself.
        """
        culprit = self._culprit(SOURCE)
        if self.source.asset:
            raise DefinitionError(
                f"{culprit}: the asset {self.source.asset!r} writes the source and reports its own "
                "versions; observe that one, or declare vd.parquet without asset="
            )
        from vane_dagster.orchestration.assets import build_source

        return build_source(self, asset_options(culprit, asset))
