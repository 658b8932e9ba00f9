"""`FragmentStore`: the storage for results, and an IO manager for other assets.

Importing it imports little: what it does for a step is in `asset_rows`.

Dagster inspects the annotations of resources at runtime, so this module does not postpone their
evaluation.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from vane_dagster._arguments import path_text
from vane_dagster._home import default_root
from vane_dagster._secrets import errors_masked
from vane_dagster.errors import StoreError
from vane_dagster.orchestration.resource_arguments import DeclaredArguments
from vane_dagster.storage.filesystem import StoragePath, absolute_url

if TYPE_CHECKING:
    from vane_dagster.storage.store import Store


class FragmentStore(DeclaredArguments, dg.ConfigurableIOManager):
    """Storage for parts and manifests: a local folder or any fsspec file system.

    It is also an IO manager. A downstream asset or check receives a stage's rows as the type of its
    input annotation: `pyarrow.Table` (also without annotation), `pyarrow.dataset.Dataset`,
    `pyarrow.RecordBatchReader`, `pandas.DataFrame`, `polars.DataFrame`, `polars.LazyFrame`,
    `duckdb.DuckDBPyRelation` or `ray.data.Dataset`. Several partitions form one table, in the order
    of their definition. A check without partitions reads the partitions of the run, or all
    that are materialized. The metadata of the input can select ``columns`` and set
    ``allow_missing_partitions``.

    With a `fallback` the store is a branch: partitions of a stage that the branch has committed are
    read from the branch, all others from the fallback. Inferred schemas, adoptions and fragment
    sizes of the fallback also apply in the branch. Changes in the branch stay there until
    ``vane-dagster store promote``. Neither root may contain the other, and the fallback must not
    be a branch. ``storage_options`` apply to both roots, unless one is on the local disk.

    An ordinary asset with this IO manager can return any of these types. The same store keeps its
    rows, and a pipeline can use them as its source.
    """

    root: str | None = Field(
        default=None,
        description="A path or fsspec URL, such as 's3://lake/.vane'. Default: "
        "$VANE_DAGSTER_STORE, else a folder of this user.",
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the fsspec file system. Give secrets as dg.EnvVar('NAME'): "
        "Dagster's UI shows literal values.",
        json_schema_extra={"dagster__is_secret": True},
    )

    keep_sources: bool = Field(
        default=True,
        description="Whether to keep the source code of results, so that a plan can show edits.",
    )

    fallback: str | None = Field(
        default=None,
        description="Makes the store a branch: the root of the store from which it reads missing "
        "partitions, such as 's3://lake/.vane'. Nothing is written there. An empty text, such as "
        "the value of an environment variable outside of branches, means none.",
    )

    targets: dict[str, str] = Field(
        default_factory=dict,
        description="For a branch: the targets of write stages, such as {'docs/published': "
        "'s3://lake/dev/published/{partition_key}'}. Others are published below its root.",
    )

    def __init__(self, **arguments: Any) -> None:
        for name in {"root", "fallback"} & arguments.keys():
            arguments[name] = path_text(arguments[name])
        super().__init__(**arguments)

    def open(self) -> "Store":
        """Open the store at the root."""
        from vane_dagster.storage.store import Store, open_branch

        root = default_root() if self.root is None else self.root
        options = _resolved(self.storage_options)
        if not self.fallback:
            if self.targets:
                raise StoreError(
                    "FragmentStore: targets is only for a branch; pass fallback= too, or leave "
                    "targets out"
                )
            return Store(StoragePath(absolute_url(root), options), self.keep_sources)
        branch = open_branch(root, self.fallback, options, self.keep_sources, self.targets)
        if (other := branch.layers[-1].branch_of) is not None:
            raise StoreError(
                f"FragmentStore: fallback {self.fallback!r} is itself a branch, of {other!r}. "
                f"Promote it first, or pass fallback={other!r}"
            )
        return branch

    def load_input(self, context: dg.InputContext) -> Any:
        """Load the rows of an asset as the type of the input's annotation.

        Raises:
            StoreError: If the type is not supported, or a partition was never materialized.
        """
        from vane_dagster.orchestration.asset_rows import load_rows

        with errors_masked():
            return load_rows(self, context)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Store the rows that an ordinary asset returned.

        Args:
            context: The context of the output.
            obj: The rows, or a dict of partition key to rows.

        Raises:
            StoreError: If `obj` is not rows, or lacks the rows of a partition of the run.
        """
        from vane_dagster.orchestration.asset_rows import keep_rows

        with errors_masked():
            keep_rows(self, context, obj)


def _resolved(value: Any) -> Any:
    """Resolve the `dg.EnvVar` values in options; Dagster does not resolve them inside a dict."""
    if isinstance(value, Mapping):
        if set(value) != {"env"} or not isinstance(value["env"], str):
            return {name: _resolved(item) for name, item in value.items()}
        value = dg.EnvVar(value["env"])
    if not isinstance(value, dg.EnvVar):
        return value
    if (variable := os.environ.get(value.env_var_name)) is None:
        raise StoreError(
            f"FragmentStore: storage_options names the variable {value.env_var_name!r}, which is "
            "not in the environment of the run; set it there"
        )
    return variable
