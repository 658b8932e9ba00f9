"""Evaluation of a stage's checks for a partition, from its manifest or from its rows."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from vane_dagster._dataclass import dataclass
from vane_dagster._keywords import require_columns
from vane_dagster._lazy import pc
from vane_dagster._secrets import masked
from vane_dagster._user_errors import contained
from vane_dagster.checks.base import Check
from vane_dagster.checks.context import (
    CheckOutcome,
    ColumnStatistics,
    PackageVersions,
    PartCounts,
    Recomputation,
)
from vane_dagster.errors import DefinitionError
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import provenance_columns
from vane_dagster.retries import class_names
from vane_dagster.storage.column_stats import Measures, measure, merge_measures
from vane_dagster.storage.damage import verified
from vane_dagster.storage.manifest import CheckResult, Manifest, PartInfo
from vane_dagster.storage.packages import version_of
from vane_dagster.storage.packed_tensors import schema_of_file, unpacked
from vane_dagster.storage.quarantine import first_faults
from vane_dagster.storage.reader import find, find_all, places, with_rows
from vane_dagster.storage.store import Store
from vane_dagster.types.schema import empty_table
from vane_dagster.types.sql import unused
from vane_dagster.types.tensors import unsliced

if TYPE_CHECKING:
    import pyarrow.dataset as ds

    from vane_dagster.checks.versions import Diff

_INTERRUPTS = {"KeyboardInterrupt", "DagsterExecutionInterruptedError"}
_LOOKED_BACK = 64
_FRAGMENTS = 64
_BATCH = 8192

Before = Callable[[str], Iterable[str]]
"""Returns the partitions before one, the nearest first. Called from several threads."""


class CheckRunner:
    """Evaluates the checks of a pipeline's stages."""

    def __init__(
        self,
        pipeline: Pipeline,
        store: Store,
        before: Before = lambda partition: (),
        run_id: str = "",
    ) -> None:
        self._pipeline, self._store = pipeline, store
        self.before = before
        self._run_id = run_id
        self._code_read = _read_code(pipeline)

    def results(self, manifest: Manifest) -> tuple[CheckResult, ...]:
        """Evaluate the checks of the manifest's stage.

        A result in the manifest is reused if the check's definition is unchanged.
        """
        checks = self._pipeline._checks_of(manifest.stage)
        known = results_for(checks, manifest, self._definition)
        missing = [check for check in checks if check.name not in known]
        new = evaluate(missing, self._context(manifest), self._definition)
        known |= {result.name: result for result in new}
        return tuple(known[check.name] for check in checks)

    def recomputed(
        self, check: Check, manifest: Manifest, recomputation: Recomputation
    ) -> CheckResult:
        """Evaluate a check for a partition with recomputed rows."""
        context = replace(self._context(manifest), recomputation=recomputation)
        (result,) = evaluate([check], context, self._definition)
        return result

    def _definition(self, check: Check) -> str:
        return self._code_read.get(id(check)) or check.definition

    def _context(self, manifest: Manifest) -> ManifestContext:
        return ManifestContext(
            manifest=manifest,
            id=self._pipeline[manifest.stage].id,
            dataset=functools.cache(lambda: self._dataset(manifest)),
            first_faults=functools.partial(
                first_faults, self._store.parts_of(manifest), manifest.parts
            ),
            previous=functools.cache(lambda: self._previous(manifest)),
            compare=functools.partial(self._diff, manifest),
            run_id=self._run_id,
        )

    def _previous(self, manifest: Manifest) -> ManifestContext | None:
        """The nearest earlier partition that was materialized."""
        if manifest.partition is None:
            return None
        keys = list(itertools.islice(self.before(manifest.partition), _LOOKED_BACK))
        found = self._store.latest(manifest.pipeline, manifest.stage, keys)
        key = next((key for key in keys if key in found), None)
        if key is None:
            return None
        return self._context(self._store.read(manifest.pipeline, manifest.stage, key, found[key]))

    def _diff(self, manifest: Manifest, with_: Any, *options: Any) -> Diff | None:
        """Compare a partition with another version; see `CheckContext.diff`."""
        from vane_dagster.checks.versions import Side, compare_versions

        own = other = f"{manifest.pipeline}/{manifest.stage}"
        store = self._store
        if isinstance(with_, str):
            other = name = with_
        elif (found := with_.open() if with_ is not None else store.fallback) is not None:
            store, name = found, found.root.url
        else:
            return None
        manifests = find(store, other.split("/"), [manifest.partition])
        if not manifests and with_ is not None:
            find_all(store, other.split("/"), None)  # raises if it has no partition at all
        if not manifests:
            return None
        sides = Side(name, store, manifests), Side(own, self._store, {manifest.partition: manifest})
        return compare_versions(f"stage {own!r}", own, sides, *options)

    def _dataset(self, manifest: Manifest) -> ds.Dataset:
        import pyarrow.dataset as ds

        manifest = with_rows(self._store, manifest)
        folder, names = places(self._store, manifest)
        if not names:
            return ds.dataset(empty_table(manifest.schema))
        files = [folder.file(name) for name in names]
        return ds.dataset(files, schema=manifest.schema, filesystem=folder.fs, format=verified())


def _read_code(pipeline: Pipeline) -> dict[int, str]:
    """Definitions of user-defined checks at the start of a run, by the checks' ids.

    Files edited later are not the code that this process has loaded.
    """
    found = {}
    for check in (check for stage in pipeline for check in pipeline._checks_of(stage.name)):
        with contextlib.suppress(Exception):  # evaluation raises it again
            if not check.is_built_in:
                found[id(check)] = check.definition
    return found


def evaluate(
    checks: Iterable[Check],
    context: ManifestContext,
    definition: Callable[[Check], str] = operator.attrgetter("definition"),
) -> tuple[CheckResult, ...]:
    """Evaluate checks; one that raises has failed, with the error as its description."""
    alone = replace(context, previous=_refuse_previous)
    return tuple(
        _evaluated(check, context if check.compares else alone, definition) for check in checks
    )


def _refuse_previous() -> ManifestContext:
    raise DefinitionError(
        "the check asks for the previous partition; set compares = True in its class, so that it "
        "is committed first"
    )


def results_for(
    checks: Iterable[Check],
    manifest: Manifest,
    definition: Callable[[Check], str] = operator.attrgetter("definition"),
) -> dict[str, CheckResult]:
    """The results in a manifest, by name, of checks with an unchanged definition.

    Checks that raised are excluded, and thus evaluated again; so are those that are not lasting.
    """
    stored = {result.name: result for result in manifest.checks}
    found = {}
    for check in checks:
        if check.lasting and check.name in stored:
            with contextlib.suppress(Exception):  # the code of a class may have no identity
                if stored[check.name].definition == definition(check):
                    found[check.name] = stored[check.name]
    return found


def _evaluated(
    check: Check, context: ManifestContext, definition_of: Callable[[Check], str]
) -> CheckResult:
    digest = ""
    try:
        outcome = _validated(check.evaluate(context))
        digest = definition_of(check)
    except BaseException as error:  # a check never stops a run; extensions in Rust panic
        if class_names(error) & _INTERRUPTS:
            raise
        safe = contained(error)
        text = masked(f"{type(safe).__name__}: {safe}")
        described = f"The check could not be evaluated: {text}"
        outcome = CheckOutcome(False, described, {"error": text})
    return CheckResult(
        name=check.name,
        passed=outcome.passed,
        blocking=check.blocking,
        severity=check.severity if check.blocking else outcome.severity or check.severity,
        description=outcome.description,
        metadata=outcome.metadata,
        definition=digest,
    )


def _validated(outcome: Any) -> CheckOutcome:
    """Return an outcome in the form in which it is stored."""
    if not isinstance(outcome, CheckOutcome) or not isinstance(outcome.passed, (bool, np.bool_)):
        raise TypeError("expected evaluate to return vd.checks.CheckOutcome(True) or (False)")
    if outcome.severity not in (None, "ERROR", "WARN"):
        raise TypeError(f'severity is {outcome.severity!r}; expected "ERROR" or "WARN"')
    return CheckOutcome(
        bool(outcome.passed),
        masked(str(outcome.description)),
        _plain(outcome.metadata),
        outcome.severity,
    )


def _plain(value: Any) -> Any:
    """A metadata value as JSON, without secrets."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    raise TypeError(
        f"metadata has a {type(value).__name__}; expected texts, numbers, booleans, or lists and "
        "mappings of them"
    )


@dataclass(frozen=True)
class ManifestContext:
    """The `CheckContext` of a stage's partition in the store.

    Attributes:
        manifest: Its manifest, with or without results of checks.
        id: The column that identifies a row.
        dataset: Opens its rows; called each time a check reads rows.
        first_faults: Describes the first of its failed rows, at most a number of them.
        previous: Finds the stage's previous partition.
        compare: Compares it with another version; see `CheckContext.diff`.
        run_id: The current run; empty outside of one.
        recomputation: Recomputed rows, if any.
    """

    manifest: Manifest
    id: str
    dataset: Callable[[], ds.Dataset]
    first_faults: Callable[[int], Sequence[str]] = lambda limit: ()
    previous: Callable[[], ManifestContext | None] = lambda: None
    compare: Callable[..., Diff | None] = lambda *given: None
    run_id: str = ""
    recomputation: Recomputation | None = None

    @property
    def partition(self) -> str | None:
        return self.manifest.partition

    @property
    def schema(self) -> pa.Schema:
        stored = self.manifest.schema  # the rows of a `write` stage are read in its upstream stage
        added = provenance_columns() if self.manifest.kind == "write" else ()
        return pa.schema([field for field in stored if field.name not in added])

    @property
    def keys(self) -> Sequence[str]:
        return tuple(dict.fromkeys((self.id, *self.manifest.keys)))

    @property
    def fan_out(self) -> bool:
        return bool(self.manifest.info.get("children"))

    @functools.cached_property
    def counts(self) -> PartCounts:
        return PartCounts.total(self.parts)

    @functools.cached_property
    def parts(self) -> Sequence[PartCounts]:
        names = [each.name for each in fields(PartCounts)]
        parts = self.manifest.parts
        return [PartCounts(**{name: getattr(part, name) for name in names}) for part in parts]

    @property
    def packages(self) -> Sequence[PackageVersions]:
        return package_versions(self.manifest.parts, self.run_id)

    def first_failures(self, limit: int) -> Sequence[str]:
        return self.first_faults(limit)

    def statistics(self, columns: Sequence[str]) -> Mapping[str, ColumnStatistics]:
        require_columns("the stage", columns, self.schema.names)
        measures = self._measured(columns)
        counted = [each.name for each in fields(ColumnStatistics)]
        return {
            name: ColumnStatistics(**{n: int(v) for n, v in found.items() if n in counted})
            for name, found in ((name, measures.get(name, {})) for name in columns)
        }

    def _measured(self, columns: Sequence[str]) -> Measures:
        """Measures of the columns; computed now for parts that were written without them."""
        parts = [part for part in self.manifest.parts if part.rows]
        if all(name in part.measures for part in parts for name in columns):
            return merge_measures({name: part.measures[name] for name in columns} for part in parts)
        batches = map(pa.Table.from_batches, ([batch] for batch in self.batches(columns)))
        return merge_measures(measure(batch, columns) for batch in batches)

    def batches(
        self, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        wanted = self.schema.names if columns is None else columns
        require_columns("the stage", wanted, self.schema.names)
        dataset = self.dataset()
        return (
            batch
            for fragment in dataset.get_fragments()
            for batch in _batches(fragment, dataset.schema, wanted, where)
        )

    def sample(self, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        require_columns("the stage", columns, self.schema.names)
        return sample(self.dataset(), columns, rows)

    def lookup(self, ids: pa.Array, columns: Sequence[str]) -> pa.Table:
        wanted = list(dict.fromkeys((self.id, *columns)))
        require_columns("the stage", wanted, self.schema.names)
        dataset, where = self.dataset(), pc.field(self.id).isin(ids)
        found: list[pa.RecordBatch] = []
        for fragment in dataset.get_fragments():
            if sum(map(len, found)) == len(ids):
                break
            # Other columns are read only from fragments that have some of the ids.
            if any(len(b) for b in _batches(fragment, dataset.schema, [self.id], where)):
                found += _batches(fragment, dataset.schema, wanted, where)
        return pa.Table.from_batches(found, pa.schema([self.schema.field(n) for n in wanted]))

    def diff(
        self,
        with_: Any = None,
        columns: Sequence[str] | None = None,
        tolerance: float = 0.0,
        sample: int = 20_000,
    ) -> Diff | None:
        return self.compare(with_, columns, tolerance, sample)

    def recomputed(self) -> Recomputation:
        if self.recomputation is None:
            raise DefinitionError("no rows were computed again; define rows_to_recompute")
        return self.recomputation


def package_versions(parts: Sequence[PartInfo], run_id: str) -> list[PackageVersions]:
    """The packages that parts were computed with, and their current versions.

    Current versions are those of the run's workers, according to its own parts; without such parts,
    those installed here.
    """
    workers = _versions(part for part in parts if part.made and part.made.run_id == run_id)
    found = []
    for name, recorded in _versions(parts).items():
        here = version_of(name)
        current = workers.get(name) or ([here] if here else [])
        texts = {f"{name}=={version}" for version in recorded if version not in current}
        outdated = sum(not texts.isdisjoint(part.made.packages) for part in parts if part.made)
        found.append(PackageVersions(name, recorded, current, outdated if current else 0))
    return found


def _versions(parts: Iterable[PartInfo]) -> Mapping[str, list[str]]:
    """The packages that parts were computed with, each with all its versions."""
    found: dict[str, list[str]] = {}
    for text in sorted({text for part in parts if part.made for text in part.made.packages}):
        name, _, version = text.partition("==")
        found.setdefault(name, []).append(version)
    return found


def sample(dataset: ds.Dataset, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
    """Rows chosen at random with a fixed seed, batch by batch.

    They are spread over the whole dataset; at most 64 of its fragments are opened.
    """
    fragments = list(dataset.get_fragments())
    if len(fragments) > _FRAGMENTS:
        spread = np.linspace(0, len(fragments) - 1, _FRAGMENTS).round().astype(int)
        fragments = [fragments[i] for i in spread]
    counts = [fragment.count_rows() for fragment in fragments]
    total = sum(counts)
    chosen = np.arange(total)
    if total > rows:
        chosen = np.random.default_rng(0).choice(total, rows, replace=False, shuffle=False)
        chosen.sort()
    start = 0
    for fragment, count in zip(fragments, counts):
        if np.searchsorted(chosen, start) < np.searchsorted(chosen, start + count):
            for batch in _batches(fragment, dataset.schema, columns):
                low, high = np.searchsorted(chosen, [start, start + len(batch)])
                yield batch.take(pa.array(chosen[low:high] - start))
                start += len(batch)
        else:
            start += count


def _batches(
    fragment: ds.Fragment, schema: pa.Schema, columns: Sequence[str], where: Any = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a fragment in small batches."""
    import pyarrow.dataset as ds  # imports pandas if installed

    selected: dict[str, Any] = {name: pc.field(name) for name in columns}
    options = {}
    if where is not None:  # applied here, because a scanner selects from slices: see `unsliced`
        selected[passes := unused("passes", columns)] = where
    if isinstance(fragment, ds.ParquetFileFragment):
        if where is not None:
            fragment = fragment.subset(where, schema=schema)
        scan = ds.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
        options["fragment_scan_options"] = scan
    scanner = fragment.scanner(
        schema=schema_of_file(schema, fragment.physical_schema),
        columns=selected,
        batch_size=_BATCH,
        batch_readahead=1,
        fragment_readahead=1,
        **options,
    )
    for batch in scanner.to_batches():
        rows = unsliced(unpacked(pa.Table.from_batches([batch]), schema))
        if where is not None:
            rows = rows.filter(rows.column(passes)).drop_columns([passes])
        yield from rows.to_batches()
