"""Comparison of rows with another version of them, like `diff`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vane_dagster._arguments import NAME
from vane_dagster.checks.base import ANY, Check
from vane_dagster.checks.context import CheckOutcome
from vane_dagster.errors import DefinitionError, SchemaError, names

if TYPE_CHECKING:
    import pyarrow as pa

    from vane_dagster.checks.partition import CheckContext
    from vane_dagster.checks.versions import Diff

_STAGE = re.compile(f"{NAME.pattern}/{NAME.pattern}")
_MAX_TABLES = 30


@dataclass(frozen=True)
class Compared(Check):
    """The differences, by id, between the rows and those of another stage or store.

    The comparison is that of `vane_dagster.diff`, with the version that is in force when the check
    is evaluated, in each run of the partition. A partition that the other version lacks passes.

    Attributes:
        with_: A stage, or its name such as "docs/embedding", in the same store; a stage of the same
            pipeline must be declared before. A `FragmentStore`: the same stage there. Default:
            the same stage in the fallback of a branch; in a store without a fallback nothing is
            compared.
        max_different: The largest share of the rows of both versions together that may be different
            or in one version only, from 0 to 1. Default: no limit.
        columns: The columns to compare. Default: those that both versions have, without
            the usage of prompts, whose seconds always differ.
        tolerance: The largest difference of floating-point numbers, also inside of other values,
            relative to one plus their magnitude. All other values must be equal.
    """

    with_: Any = field(default=None, hash=False)
    max_different: float | None = field(default=None, kw_only=True)
    columns: Sequence[str] | None = field(default=None, kw_only=True)
    tolerance: float = field(default=0.0, kw_only=True)

    lasting: ClassVar[bool] = False
    _bounds: ClassVar[Mapping[str, float]] = {"tolerance": ANY, "max_different": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        path = getattr(getattr(self.with_, "key", self.with_), "path", ())
        with_ = "/".join(path) or self.with_
        is_store = hasattr(with_, "open") and not isinstance(with_, os.PathLike)
        is_stage = isinstance(with_, str) and _STAGE.fullmatch(with_)
        if not (with_ is None or is_stage or is_store):
            raise DefinitionError(
                f"{self._location}: with_ is {self.with_!r}; expected a stage, its name such as "
                "'docs/embedding', or a FragmentStore with the same stage"
            )
        self._set(with_=with_)

    @property
    def description(self) -> str:
        other = self.with_ if isinstance(self.with_, str) else "the same stage in another store"
        limit = self.max_different
        most = "" if limit is None else f"; at most {limit:.4g} of the rows may differ"
        return f"The rows are compared by id with those of {other}{most}"

    def fit(self, schema: pa.Schema, location: str) -> None:
        self._require(schema, location, self.columns)

    def stage_of(self, pipeline: str) -> str:
        """Return the stage of a pipeline that it compares with; empty for none."""
        name, _, stage = self.with_.partition("/") if isinstance(self.with_, str) else ("", "", "")
        return stage if name == pipeline else ""

    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Compare the rows.

        Raises:
            SchemaError: If the other version lacks a column to compare.
            StoreError: If the ids have different names or types, or the other stage has no rows in
                any partition.
        """
        diff = context._compare(self.with_, self.columns, self.tolerance)
        if diff is None:
            return CheckOutcome(True, "There is no other version of the partition to compare with")
        if lacking := {*(self.columns or ())} & {*diff.now.columns}:
            raise SchemaError(f"{diff.before.name} has no column {names(sorted(lacking))}")
        one_sided = diff.only_before + diff.only_now
        rows = one_sided + diff.equal + diff.different
        share = (one_sided + diff.different) / max(1, rows)
        text = (
            f"{diff.different:,} of {rows:,} rows differ from {diff.before.name}; "
            f"{diff.only_before:,} exist only there and {diff.only_now:,} only here"
        )
        metadata: dict[str, Any] = {
            "equal": diff.equal,
            "different": diff.different,
            "only_there": diff.only_before,
            "only_here": diff.only_now,
            "share_different": share,
        }
        if self.max_different is not None:
            text += f" ({share:.2%}); the limit is {self.max_different:.4g}"
            metadata["max_different"] = self.max_different
        metadata |= dict(_tables(diff))
        passed = self.max_different is None or share <= self.max_different
        return CheckOutcome(passed, text, metadata)


def _tables(diff: Diff) -> Iterator[tuple[str, Sequence[dict[str, str]]]]:
    """Yield the tables of a comparison as metadata."""
    for title, (header, *rows) in [*diff.tables()][:_MAX_TABLES]:
        yield title, [dict(zip((name or "measure" for name in header), row)) for row in rows]
