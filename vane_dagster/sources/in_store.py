"""`InStore`: a source whose rows are in the pipeline's own store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vane_dagster.sources.base import Source

if TYPE_CHECKING:
    import dagster as dg

    from vane_dagster.storage.store import Store


@dataclass(frozen=True, kw_only=True)
class InStore(Source):
    """A source whose rows are in the pipeline's own store.

    Attributes:
        store: The store, once the source is bound to it.
        pipeline: The pipeline that reads it, once it is known.
    """

    store: Store | None = field(default=None, repr=False, compare=False)
    pipeline: str = field(default="", repr=False, compare=False)

    def of_pipeline(self, name: str, partitions_def: dg.PartitionsDefinition[Any] | None) -> Source:
        return replace(self, pipeline=name)

    def bind(self, store: Store) -> Source:
        return replace(self, store=store)

    @property
    def bound(self) -> Store:
        """The store to which the source is bound."""
        assert self.store is not None, f"{self.place} is bound to a store before it is used"
        return self.store
