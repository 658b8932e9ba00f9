"""Evaluation of a stage's checks for a partition, from its manifest or from its rows."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vane_dagster._secrets import masked
from vane_dagster._user_errors import contained
from vane_dagster.checks.base import Check
from vane_dagster.checks.context import CheckOutcome, Recomputation
from vane_dagster.checks.partition import CheckContext
from vane_dagster.errors import DefinitionError
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.retries import class_names
from vane_dagster.storage.damage import verified
from vane_dagster.storage.manifest import CheckResult, Manifest
from vane_dagster.storage.quarantine import first_faults
from vane_dagster.storage.reader import find, find_all, places, with_rows
from vane_dagster.storage.store import Store
from vane_dagster.types.schema import empty_table

if TYPE_CHECKING:
    import pyarrow.dataset as ds

    from vane_dagster.checks.versions import Diff

_INTERRUPTS = {"KeyboardInterrupt", "DagsterExecutionInterruptedError"}
_LOOKED_BACK = 64

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
        self.pipeline, self._store = pipeline, store
        self.before = before
        self._run_id = run_id
        self._code_read = _read_code(pipeline)
        self._user_lock = threading.Lock()

    def results(self, manifest: Manifest) -> tuple[CheckResult, ...]:
        """Evaluate the checks of the manifest's stage.

        A result in the manifest is reused if the check's definition is unchanged. Called from
        several threads; only built-in checks are evaluated at the same time.
        """
        checks = self.pipeline._checks_of(manifest.stage)
        known = results_for(checks, manifest, self._definition)
        missing = [check for check in checks if check.name not in known]
        is_own = all(check.is_built_in for check in missing)
        with contextlib.nullcontext() if is_own else self._user_lock:
            new = evaluate(missing, self._context(manifest), self._definition)
        known |= {result.name: result for result in new}
        return tuple(known[check.name] for check in checks)

    def recomputed(
        self, check: Check, manifest: Manifest, recomputation: Recomputation
    ) -> CheckResult:
        """Evaluate a check for a partition with recomputed rows."""
        context = replace(self._context(manifest), _recomputation=recomputation)
        (result,) = evaluate([check], context, self._definition)
        return result

    def _definition(self, check: Check) -> str:
        return self._code_read.get(id(check)) or check.definition

    def _context(self, manifest: Manifest) -> CheckContext:
        return CheckContext(
            id=self.pipeline[manifest.stage].id,
            schema=with_rows(self._store, manifest).schema,  # where the rows are read
            _manifest=manifest,
            _dataset=functools.cache(lambda: self._dataset(manifest)),
            _first_faults=functools.partial(
                first_faults, self._store.parts_of(manifest), manifest.parts
            ),
            _previous=functools.cache(lambda: self._previous(manifest)),
            _compare=functools.partial(self._diff, manifest),
            _run_id=self._run_id,
        )

    def earlier(self, partition: str | None) -> Sequence[str]:
        """Return the partitions that one may be compared with, the nearest first."""
        before = () if partition is None else self.before(partition)
        return list(itertools.islice(before, _LOOKED_BACK))

    def _previous(self, manifest: Manifest) -> CheckContext | None:
        """The nearest earlier partition that was materialized."""
        keys = self.earlier(manifest.partition)
        manifests = self._store.latest(manifest.pipeline, manifest.stage, keys)
        key = next((key for key in keys if key in manifests), None)
        if key is None:
            return None
        return self._context(
            self._store.read(manifest.pipeline, manifest.stage, key, manifests[key])
        )

    def _diff(self, manifest: Manifest, with_: Any, *options: Any) -> Diff | None:
        """Compare a partition with another version; see `Compared`."""
        from vane_dagster.checks.versions import Side, compare_versions

        own = other = f"{manifest.pipeline}/{manifest.stage}"
        store = self._store
        if isinstance(with_, str):
            other = name = with_
        elif (opened := with_.open() if with_ is not None else store.fallback) is not None:
            store, name = opened, opened.root.url
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
    definitions = {}
    for check in (check for stage in pipeline for check in pipeline._checks_of(stage.name)):
        with contextlib.suppress(Exception):  # evaluation raises it again
            if not check.is_built_in:
                definitions[id(check)] = check.definition
    return definitions


def evaluate(
    checks: Iterable[Check],
    context: CheckContext,
    definition: Callable[[Check], str] = operator.attrgetter("definition"),
) -> tuple[CheckResult, ...]:
    """Evaluate checks; one that raises has failed, with the error as its description."""
    alone = replace(context, _previous=_refuse_previous)
    return tuple(
        _evaluated(check, context if check.compares else alone, definition) for check in checks
    )


def _refuse_previous() -> CheckContext:
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
    results = {}
    for check in checks:
        if check.lasting and check.name in stored:
            with contextlib.suppress(Exception):  # the code of a class may have no identity
                if stored[check.name].definition == definition(check):
                    results[check.name] = stored[check.name]
    return results


def _evaluated(
    check: Check, context: CheckContext, definition_of: Callable[[Check], str]
) -> CheckResult:
    digest = ""
    try:
        outcome = _validated(check, check.evaluate(context))
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


def _validated(check: Check, outcome: Any) -> CheckOutcome:
    """Return an outcome in the form in which it is stored."""
    if not isinstance(outcome, CheckOutcome) or not isinstance(outcome.passed, (bool, np.bool_)):
        raise TypeError("expected evaluate to return vd.checks.CheckOutcome(True) or (False)")
    if outcome.severity not in (None, "ERROR", "WARN"):
        raise TypeError(f'severity is {outcome.severity!r}; expected "ERROR" or "WARN"')
    metadata = _plain(outcome.metadata)
    shown = (f"{n}: {v}" for n, v in metadata.items() if not isinstance(v, (list, dict)))
    figures, required = ", ".join(shown), check.description
    required = "" if required == check.name else required  # it has no docstring
    text = outcome.description or (required if outcome.passed else figures) or required or figures
    return CheckOutcome(bool(outcome.passed), masked(str(text)), metadata, outcome.severity)


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
