"""Evaluates checks: from what a manifest records of its parts, or from the rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from vane_dagster._secrets import masked
from vane_dagster.checks.base import Check
from vane_dagster.checks.builtin import (
    ErrorRate,
    IdsComplete,
    NullRate,
    PackagesUnchanged,
    Text,
    Vectors,
)
from vane_dagster.checks.comparisons import Drift, Golden
from vane_dagster.checks.context import Finding, Subject, batches
from vane_dagster.checks.drift import drift
from vane_dagster.checks.golden import golden
from vane_dagster.errors import SchemaError, names
from vane_dagster.storage.column_stats import Measures, measure, merge_measures
from vane_dagster.storage.manifest import CheckResult, Manifest
from vane_dagster.storage.packages import changed, versions
from vane_dagster.types.kinds import is_floats, is_text

__all__ = ["Subject", "evaluate", "verdicts"]

_SHOWN = 50
_DESCRIBED = 5


def evaluate(checks: Iterable[Check], subject: Subject) -> tuple[CheckResult, ...]:
    """What checks find; one that raises has failed, with the error as its description.

    Data is opened once at most, and only for checks that read it.
    """
    subject = replace(
        subject,
        dataset=functools.cache(subject.dataset),
        previous=functools.cache(subject.previous),
    )
    return tuple(_evaluated(check, subject) for check in checks)


def verdicts(checks: Iterable[Check], manifest: Manifest) -> dict[str, CheckResult]:
    """The results in a manifest, by name, of checks that are still defined as they were.

    Results of a former version of the definition are kept, as `Check.definitions` says. One that
    has raised is not among them, so that it is evaluated again, nor is one that tells of the
    present.
    """
    stored = {result.name: result for result in manifest.checks}
    return {
        check.name: stored[check.name]
        for check in checks
        if check.lasting
        and check.name in stored
        and stored[check.name].definition in _definitions(check)
    }


def _definitions(check: Check) -> tuple[str, ...]:
    try:
        return check.definitions
    except Exception:  # of reading the file of a `Golden`, by drivers of many kinds
        return ()


def _evaluated(check: Check, subject: Subject) -> CheckResult:
    definition = ""
    try:
        opened = check.opened()
        finding = _FINDERS[type(check)](opened, subject)
        definition = opened.definition
    except Exception as error:  # a check never stops a run
        text = masked(f"{type(error).__name__}: {error}")
        finding = Finding(False, f"The check could not be evaluated: {text}", {"error": text})
    return CheckResult(
        name=check.name,
        passed=finding.passed,
        blocking=check.blocking,
        severity=check.severity,
        description=finding.description,
        metadata=finding.metadata,
        definition=definition,
    )


def _ids_complete(check: IdsComplete, subject: Subject) -> Finding:
    """Compares each part with the rows that it was made from."""
    many = bool(subject.manifest.info.get("children"))
    parts = [p for p in subject.manifest.parts if p.rows_in or not p.rows or p.made]
    over = [p.rows + p.filtered + p.quarantined - p.rows_in for p in parts]
    lost = sum(-n for n in over if n < 0)
    if many:
        spent = (max(0, p.filtered + p.quarantined - p.rows_in) for p in parts)
        invented = sum(spent)
    else:
        invented = sum(n for n in over if n > 0)
    counts = _counts(subject.manifest)
    metadata = {**counts, "lost": lost, "invented": invented}
    if unknown := subject.manifest.rows - sum(p.rows for p in parts):
        metadata["rows_of_unknown_origin"] = unknown
    rows_in = f"{counts['rows_in']:,} input rows"
    if lost or invented:
        described = (
            f"{lost:,} of {rows_in} are missing from the output; {invented:,} output rows have no "
            "input row"
        )
    else:
        described = f"All {rows_in} are in the output, filtered or quarantined"
    return Finding(not lost and not invented, described, metadata)


def _error_rate(check: ErrorRate, subject: Subject) -> Finding:
    counts = _counts(subject.manifest)
    failed = counts["quarantined"] + counts["nulled"]
    rate = _share(failed, counts["rows_in"])
    shown, limit = _percents(rate, check.max_rate)
    return Finding(
        rate <= check.max_rate,
        f"{failed:,} of {counts['rows_in']:,} rows failed ({shown}); the limit is {limit}",
        {**counts, "error_rate": rate, "max_rate": check.max_rate},
    )


def _packages_unchanged(check: PackagesUnchanged, subject: Subject) -> Finding:
    parts = subject.manifest.parts
    found = changed(parts, subject.run_id)
    metadata: dict[str, Any] = {"packages": len(versions(parts)), "changed": len(found)}
    told = []
    for each in found:
        then, now = " and ".join(each.then), " and ".join(each.now)
        metadata |= {f"then/{each.name}": then, f"now/{each.name}": now}
        share = f"{each.parts:,} of {len(parts):,} fragments"
        told.append(f"{each.name} is {now} and was {then} when {share} were computed")
    if told:
        return Finding(False, _first(told), metadata)
    described = "Packages have the versions that the rows were computed with"
    return Finding(True, described, metadata)


def _null_rate(check: NullRate, subject: Subject) -> Finding:
    columns = _columns(subject, check.columns)
    measures, rows = _measured(subject, columns), subject.manifest.rows
    rates = {name: _share(measures.get(name, {}).get("nulls", 0), rows) for name in columns}
    limits = {name: check.rate_of(name) for name in columns}
    return _by_column(rates, limits, "null_rate", "nulls", rows)


def _text(check: Text, subject: Subject) -> Finding:
    columns = _columns(subject, check.columns, is_text, "texts")
    measures, rows = _measured(subject, columns), subject.manifest.rows
    rates = {}
    for name in columns:
        found = measures.get(name, {})
        rates[name] = _share(found.get("empty", 0), rows - found.get("nulls", 0))
    limits = dict.fromkeys(columns, check.max_empty_rate)
    return _by_column(rates, limits, "empty_rate", "empty texts", rows)


def _vectors(check: Vectors, subject: Subject) -> Finding:
    kind = "lists of floating-point numbers"
    columns = _columns(subject, check.columns, is_floats, kind)
    schema = subject.manifest.schema
    fixed = [name for name in columns if pa.types.is_fixed_size_list(schema.field(name).type)]
    columns = columns if check.columns else fixed or columns
    measures, rows = _measured(subject, columns), subject.manifest.rows
    metadata: dict[str, Any] = {"rows": rows, "max_rate": check.max_rate}
    told, wrong = [], []
    for name in columns:
        found = measures.get(name, {})
        bad, zero = int(found.get("not_finite", 0)), int(found.get("zero", 0))
        vectors = rows - int(found.get("nulls", 0))
        rate = _share(bad + zero, vectors)
        metadata |= {f"not_finite/{name}": bad, f"zero/{name}": zero, f"bad_rate/{name}": rate}
        shown, limit = _percents(rate, check.max_rate)
        text = (
            f"{name}: {bad + zero:,} of {vectors:,} vectors are zero or not finite ({shown}; "
            f"{zero:,} zero, {bad:,} not finite); the limit is {limit}"
        )
        told.append(text)
        if rate > check.max_rate:
            wrong.append(text)
        if "dim_min" not in found:
            continue
        low, high = int(found["dim_min"]), int(found["dim_max"])
        metadata |= (
            {f"dimension/{name}": low}
            if low == high
            else {
                f"dimension_min/{name}": low,
                f"dimension_max/{name}": high,
            }
        )
        if not low == high == (check.dimension or high):
            found_here = f"is {low}" if low == high else f"varies from {low} to {high}"
            expected = check.dimension or "one dimension for all rows"
            wrong.append(f"{name}: the dimension {found_here}; expected {expected}")
    return Finding(not wrong, _first(wrong or told), metadata)


_FINDERS: Mapping[type[Check], Callable[[Any, Subject], Finding]] = {
    IdsComplete: _ids_complete,
    ErrorRate: _error_rate,
    PackagesUnchanged: _packages_unchanged,
    NullRate: _null_rate,
    Text: _text,
    Vectors: _vectors,
    Drift: drift,
    Golden: golden,
}


def _by_column(
    rates: Mapping[str, float], limits: Mapping[str, float], measure: str, what: str, rows: int
) -> Finding:
    """A finding of rates of `what`, such as nulls, with a limit for each column."""
    above = [name for name, rate in rates.items() if rate > limits[name]]
    shown = sorted(rates, key=lambda name: limits[name] - rates[name])[:_SHOWN]
    metadata = {"rows": rows, **{f"{measure}/{name}": rates[name] for name in shown}}
    if not rates:
        return Finding(True, f"The stage has no column to check for {what}", metadata)
    told = {}
    for name, rate in rates.items():
        share, limit = _percents(rate, limits[name])
        told[name] = f"{name}: {share} {what}; the limit is {limit}"
    if above:
        return Finding(False, _first([told[name] for name in above]), metadata)
    worst = max(rates, key=lambda name: rates[name])
    if not rates[worst]:
        return Finding(True, f"There are no {what} in {names(list(rates))}", metadata)
    most = "" if len(rates) == 1 else f" (the highest share of {len(rates)} columns)"
    return Finding(True, told[worst] + most, metadata)


def _columns(
    subject: Subject,
    given: Sequence[str] | None,
    is_kind: Callable[[pa.DataType], bool] | None = None,
    kind: str = "",
) -> list[str]:
    """The columns that a check is about.

    Raises:
        SchemaError: If one is missing or of another kind, or there is none of the kind.
    """
    schema = subject.manifest.schema
    if missing := [name for name in given or () if name not in schema.names]:
        raise SchemaError(
            f"there is no column {missing[0]!r}; expected one of {names(schema.names)}"
        )
    keys = {subject.id, *subject.manifest.keys}
    columns = given or [name for name in schema.names if name not in keys]
    if is_kind is None:
        return list(columns)
    fitting = [name for name in columns if is_kind(schema.field(name).type)]
    if given and (other := [name for name in given if name not in fitting]):
        raise SchemaError(f"column {other[0]!r} is {schema.field(other[0]).type}; expected {kind}")
    if not fitting:
        raise SchemaError(f"there is no column of {kind}; turn the check off")
    return fitting


def _measured(subject: Subject, columns: Sequence[str]) -> Measures:
    """Measures of the columns; counted now where the parts were written without."""
    parts = [part for part in subject.manifest.parts if part.rows]
    missing = [name for name in columns if any(name not in part.measures for part in parts)]
    known = [name for name in columns if name not in missing]
    found = merge_measures({name: part.measures[name] for name in known} for part in parts)
    if missing:
        dataset = subject.dataset()
        found |= merge_measures(
            measure(pa.Table.from_batches([batch]), missing)
            for fragment in dataset.get_fragments()
            for batch in batches(fragment, dataset.schema, missing)
        )
    return found


def _counts(manifest: Manifest) -> dict[str, int]:
    counted = ("rows", "rows_in", "filtered", "quarantined", "nulled")
    return {name: sum(getattr(part, name) for part in manifest.parts) for name in counted}


def _share(count: float, rows: float) -> float:
    return count / rows if rows else 0.0


def _first(told: Sequence[str]) -> str:
    """What is said of the first columns; of the others only how many there are."""
    more = f"; and {len(told) - _DESCRIBED} more" if len(told) > _DESCRIBED else ""
    return "; ".join(told[:_DESCRIBED]) + more


def _percents(rate: float, limit: float) -> tuple[str, str]:
    """A rate and its limit, with as many digits as it takes to tell them apart."""
    for digits in range(2, 9):
        shown = f"{rate:.{digits}%}", f"{limit:.{digits}%}"
        hidden = any(value and not float(text[:-1]) for value, text in zip((rate, limit), shown))
        if not hidden and (rate == limit or shown[0] != shown[1]):
            break
    return shown
