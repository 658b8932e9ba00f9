"""The methods that add stages to a pipeline's source or to another stage."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vane_dagster._arguments import (
    check_placeholders,
    checked_url,
    mapping,
    one_of,
    positive,
)
from vane_dagster.errors import DefinitionError, names
from vane_dagster.pipeline.embeddings import EmbedRows
from vane_dagster.pipeline.known_arguments import adds_stage
from vane_dagster.pipeline.labels import LabelRows
from vane_dagster.pipeline.map_stages import MapRows
from vane_dagster.pipeline.options import parse_include
from vane_dagster.pipeline.records import Asset, as_asset
from vane_dagster.pipeline.specs import ProjectSpec, WriteSpec, provenance_stage
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.storage.filesystem import absolute_url
from vane_dagster.storage.publish.registry import PUBLISHERS, publisher_class
from vane_dagster.storage.publish.target import PARTITION_COLUMN, Target
from vane_dagster.types.sql import as_columns, is_column, quote, referenced_columns

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Stage


class Rows(MapRows, LabelRows, EmbedRows):
    """A pipeline's source or a stage: anything that a new stage can read."""

    @adds_stage
    def project(
        self,
        name: str,
        columns: Mapping[str, str] | Sequence[str],
        *,
        where: str | None = None,
        include_columns: bool | Sequence[str] = (),
        asset: Asset | None = None,
    ) -> Stage:
        """Add a stage of columns and SQL expressions, executed by DuckDB.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            columns: Column names, or a mapping of output column to an SQL expression over one row.
                The row's id, and the ids of the rows that it was made from, are added if they are
                omitted. An expression that is only a column name keeps the column's Arrow type.
                Other timestamps with a time zone are in UTC; ``t AT TIME ZONE 'Europe/Berlin'`` is
                a local time.
            where: SQL condition. Rows for which it is not true are dropped.
            include_columns: Input columns to pass through, in addition to `columns`; True for all.
            asset: Additional attributes of the stage's Dagster asset: `vd.Asset`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If an expression does not parse, reads more than its row, or is not a
                function of the row, such as ``now()``.
        """
        location = self.pipeline._location(name)
        pairs = as_columns(columns, location)
        if where is not None:
            referenced_columns(where, f"{location}, where")
        ids = self.pipeline._key_columns(self._node)
        for id in ids:
            if not is_column(dict(pairs).get(id, quote(id)), id, location):
                raise DefinitionError(
                    f"{location}: the id {id!r} is computed by {dict(pairs)[id]!r}; ids must pass "
                    "through unchanged, so that each row can be traced to the source. Leave it "
                    "out, and give the computed column another name"
                )
        carried = [(id, quote(id)) for id in ids if id not in dict(pairs)]
        pairs = (*carried, *pairs)
        include, own = parse_include(location, include_columns), as_asset(location, asset)
        return self.pipeline._add(ProjectSpec(name, (self._node,), own, pairs, where, include))

    @adds_stage
    def write(
        self,
        name: str,
        url: str | os.PathLike[str],
        *,
        format: str = "parquet",
        storage_options: Mapping[str, Any] | None = None,
        compression: str = "zstd",
        target_file_bytes: int | None = None,
        partition_column: str = PARTITION_COLUMN,
        options: Mapping[str, Any] | None = None,
        provenance: bool | str = False,
        asset: Asset | None = None,
    ) -> Stage:
        """Add a stage that publishes the rows: as Parquet files in a folder, or in a table.

        A partition is replaced as a whole. Other files in the folder are left alone. In a table, a
        partition is replaced in one commit, so readers see either the old or the new rows. Files
        that are no longer in the table stay until you run its own maintenance: Delta's vacuum,
        Lance's ``cleanup_old_versions``, or the expiry of Iceberg's snapshots.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            url: For "parquet" a folder, as a path or fsspec URL, with ``{partition_key}`` if the
                pipeline is partitioned, or with all dimensions of a multi-partition, such as
                ``{partition_key.region}/{partition_key.day}``. For other formats the table, a local
                path or ``s3://``, which holds all partitions. For "iceberg" the folder of the
                table's files. A relative path is resolved here, in the current folder.
            format: "parquet", "delta", "lance" or "iceberg". Tables require the extra with their
                name, such as ``vane-dagster[lance]``. Lance tables store tensors as fixed-size
                lists. Delta and Iceberg tables have no unsigned integers and no fixed-size lists:
                unsigned integers of at most 32 bits become the next larger signed type, fixed-size
                lists (in Delta also bytes) become variable-size, and times of day with a zone are
                stored in UTC.
            storage_options: Options of the fsspec file system. For a table on S3, the options that
                the format's own driver supports are passed to it too: ``key``, ``secret``,
                ``token``, ``anon``, ``endpoint_url``, and ``endpoint_url`` and ``region_name`` of
                ``client_kwargs``. The driver reads missing options from AWS's environment variables
                and profiles. The server must support conditional puts, as S3 does. For an Iceberg
                table, do not repeat options of S3 and Azure that are in the catalog's properties.
            compression: "zstd", "snappy", "lz4", "gzip" or "none".
            target_file_bytes: Approximate size of the files in bytes. Neighbouring fragments share
                a file; a larger fragment has its own file. Default: one file per fragment.
            partition_column: The column of a table that holds the partition's key.
            options: The format's own options. "iceberg" needs ``catalog``, as in `vd.iceberg`, and
                ``table``, such as "db.labels". A missing table is created with the rows' columns,
                partitioned by `partition_column`. The other formats have none.
            provenance: Whether to add columns that record how the nearest stage with a function or
                a model made each row. If there are several such stages, pass the name of one. The
                columns are ``_vane_outcome`` ("computed", "copied", "failed"), ``_vane_run``,
                ``_vane_model``, ``_vane_code``, ``_vane_at``, and ``_vane_tokens`` and
                ``_vane_cost`` if the stage has a usage column and prices. A copied row has the
                tokens of the answer that it copies.
            asset: See `project`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If the URL does not distinguish partitions, there is no upstream stage,
                the library of the format is not installed, or `provenance` does not name such a
                stage.
        """
        location = self.pipeline._location(name)
        if self._node == SOURCE:
            raise DefinitionError(
                f"{location}: a source cannot be published directly; add a project stage, and "
                "publish that"
            )
        url = absolute_url(checked_url(location, url))
        publisher = publisher_class(one_of(location, "format", format, tuple(PUBLISHERS)))
        if publisher.has_folder_per_partition:
            check_placeholders(location, url, self.pipeline.partitions_def, is_target=True)
        given = mapping(location, "options", options)
        if unknown := [each for each in given if each not in publisher.options]:
            raise DefinitionError(
                f"{location}: options has {names(unknown)}; format={format!r} takes "
                f"{names(publisher.options)}"
            )
        codecs = ("zstd", "snappy", "lz4", "gzip", "none")
        declared = Target(
            url=url,
            storage_options=storage_options or {},
            compression=one_of(location, "compression", compression, codecs),
            format=format,
            target_bytes=positive(location, "target_file_bytes", target_file_bytes),
            partition_column=partition_column,
            options={**publisher.options, **given},
        )
        partitioned = self.pipeline.partitions_def is not None
        declared = publisher.validate(declared, location, partitioned)
        own = as_asset(location, asset)
        made_by = provenance_stage(self.pipeline, self._node, provenance, location)
        return self.pipeline._add(WriteSpec(name, (self._node,), own, declared, made_by))
