"""`InStore`: a source whose rows are in the pipeline's own store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vane_dagster.sources.base import Source
from vane_dagster.storage.filesystem import Location

if TYPE_CHECKING:
    from vane_dagster.storage.store import Store


@dataclass(frozen=True, kw_only=True)
class InStore(Source):
    """A source whose rows are in the pipeline's own store.

    Attributes:
        root: The store's root, once the source is bound to it.
        fallback: The root of a branch's fallback.
        pipeline: The pipeline that reads it, once it is known.
    """

    root: Location | None = field(default=None, repr=False, compare=False)
    fallback: Location | None = field(default=None, repr=False, compare=False)
    pipeline: str = field(default="", repr=False, compare=False)

    def of_pipeline(self, name: str) -> Source:
        return replace(self, pipeline=name)

    def bind(self, store: Store) -> Source:
        fallback = None if store.fallback is None else store.fallback.root
        return replace(self, root=store.root, fallback=fallback)

    @property
    def store_root(self) -> Location:
        """The root of the store to which the source is bound."""
        assert self.root is not None, f"{self.place} is bound to a store before it is used"
        return self.root
