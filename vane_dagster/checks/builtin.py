"""The two default checks of a stage, their findings, and how user checks are merged with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from vane_dagster._arguments import unexpected
from vane_dagster._texts import count, listed
from vane_dagster.checks.base import Check, CheckLike, Off
from vane_dagster.checks.context import CheckOutcome, PartCounts, Severity
from vane_dagster.errors import DefinitionError
from vane_dagster.providers.usage import USAGE
from vane_dagster.types.kinds import is_floats, is_text, is_vectors
from vane_dagster.types.schema import ERROR_COLUMN

if TYPE_CHECKING:
    from vane_dagster.checks.partition import CheckContext

_DEFAULT_RATE, _DEFAULT_ROWS = 0.01, 10
"""The share and the number of rows that may fail by default; the one that allows more counts."""

ROWS, QUALITY = "rows", "quality"
"""The names of the default checks."""

_SHOWN = 50
_DESCRIBED = 5
_FAILURES_SHOWN = 3


@dataclass(frozen=True)
class IdsComplete(Check):
    """Every input row is in the output, was filtered or was quarantined, and no other row is."""

    fix: ClassVar[str] = "Materialize it with force"

    blocking: bool = field(default=True, kw_only=True)

    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Compare each part with the rows that it was made from."""
        parts = context.parts
        over = [p.rows + p.filtered + p.quarantined - p.rows_in for p in parts]
        lost = sum(-n for n in over if n < 0)
        if context.fan_out:
            invented = sum(max(0, p.filtered + p.quarantined - p.rows_in) for p in parts)
        else:
            invented = sum(n for n in over if n > 0)
        counts = context.counts
        metadata = {**_counted(counts), "lost": lost, "invented": invented}
        rows_in = f"{counts.rows_in:,} input rows"
        if lost or invented:
            described = (
                f"{lost:,} of {rows_in} are missing from the output; {invented:,} output rows have "
                "no input row"
            )
        else:
            described = f"All {rows_in} are in the output, filtered or quarantined"
        return CheckOutcome(not lost and not invented, described, metadata)


@dataclass(frozen=True)
class ErrorRate(Check):
    """The share of rows that failed.

    The check also fails if all rows of a partition fail, because the rows are then probably not the
    cause, unless `max_rate` is 1.

    Attributes:
        max_rate: The largest share of input rows that may fail in the stage: quarantined, or null
            because of an error; also those that the source could not read. Default: 1%, or 10 rows
            if that is more. If it blocks, a partition with more failed rows is not committed.
    """

    fix: ClassVar[str] = (
        "vd.quarantine returns the rows with errors; vd.Failures(max_error_rate=) sets the limit"
    )

    max_rate: float | None = None
    blocking: bool = field(default=True, kw_only=True)

    _bounds: ClassVar[Mapping[str, float]] = {"max_rate": 1}

    def allowed(self, rows: int) -> int:
        """Return how many of a number of rows may fail."""
        if self.max_rate == 1:
            return rows
        allowed = max(_DEFAULT_ROWS, int(rows * _DEFAULT_RATE))
        if self.max_rate is not None:
            allowed = math.floor(rows * self.max_rate + 1e-9)  # 100 * 0.29 is 28.999...
        return min(allowed, max(0, rows - 1))

    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Compare the share of rows that failed with the largest allowed."""
        counts = context.counts
        failed, rows = counts.quarantined + counts.nulled, counts.rows_in
        allowed = self.allowed(rows)
        rate = _share(failed, rows)
        metadata = {**_counted(counts), "error_rate": rate, "max_failed_rows": allowed}
        if self.max_rate is not None:
            metadata["max_rate"] = self.max_rate
        limit = count(allowed, "row") if self.max_rate is None else _percent(self.max_rate)
        described = f"{failed:,} of {rows:,} rows failed ({_percent(rate)}); the limit is {limit}"
        if failed > allowed and (some := context.first_failures(_FAILURES_SHOWN)):
            described += f". The first: {'; '.join(some)}"
        return CheckOutcome(failed <= allowed, described, metadata)


@dataclass(frozen=True)
class NullRate(Check):
    """The share of nulls in each column.

    Attributes:
        max_rate: The largest share.
        columns: The columns to check. Default: all, including those of `include_columns`, except
            the ids, `error`, and the usage of prompts.
    """

    fix: ClassVar[str] = "vd.checks.NullRate(max_rate) sets the limit"

    max_rate: float = 0.5
    columns: Sequence[str] | None = None
    severity: Severity = field(default="WARN", kw_only=True)

    _bounds: ClassVar[Mapping[str, float]] = {"max_rate": 1}

    def fit(self, schema: pa.Schema, location: str) -> None:
        self._require(schema, location, self.columns)

    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Compare the share of nulls in each column with the largest allowed.

        Raises:
            DefinitionError: If a column does not exist.
        """
        columns = _columns(self, self.columns, context)
        statistics, rows = context.statistics(columns), context.counts.rows
        rates = {name: _share(statistics[name].nulls, rows) for name in columns}
        return _by_column(rates, self.max_rate, "null_rate", "nulls", rows)


@dataclass(frozen=True)
class Vectors(Check):
    """Vectors have one dimension, finite numbers, and a norm that is not zero.

    Attributes:
        columns: The columns to check. Default: fixed-size lists and one-dimensional tensors of
            floating-point numbers.
        max_rate: The largest share of vectors that may be zero or contain a null, NaN or infinity.
            The dimension must be the same in every row.
    """

    fix: ClassVar[str] = "Filter such rows, or accept a share by vd.checks.Vectors(max_rate=)"

    columns: Sequence[str] | None = None
    max_rate: float = 0.0

    _bounds: ClassVar[Mapping[str, float]] = {"max_rate": 1}

    def fit(self, schema: pa.Schema, location: str) -> None:
        self._require(schema, location, self.columns, is_floats, "lists of floating-point numbers")

    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Compare the vectors' dimensions and values with those allowed.

        Raises:
            DefinitionError: If a column does not exist, or has no vectors.
        """
        columns = _columns(self, self.columns, context, is_vectors)
        statistics, rows = context.statistics(columns), context.counts.rows
        metadata: dict[str, Any] = {"rows": rows, "max_bad_rate": self.max_rate}
        texts, wrong = [], []
        for name in columns:
            bad, zero = statistics[name].not_finite, statistics[name].zero
            vectors = rows - statistics[name].nulls
            rate = _share(bad + zero, vectors)
            metadata |= {f"not_finite/{name}": bad, f"zero/{name}": zero, f"bad_rate/{name}": rate}
            text = (
                f"{name}: {bad + zero:,} of {vectors:,} vectors are zero or not finite "
                f"({_percent(rate)}; {zero:,} zero, {bad:,} not finite); the limit is "
                f"{_percent(self.max_rate)}"
            )
            texts.append(text)
            if rate > self.max_rate:
                wrong.append(text)
            low, high = statistics[name].dim_min, statistics[name].dim_max
            if low == high:
                metadata |= {} if low is None else {f"dimension/{name}": low}
            else:
                metadata |= {f"dimension_min/{name}": low, f"dimension_max/{name}": high}
                wrong.append(f"{name}: the dimension varies from {low} to {high}; expected one")
        texts = wrong or texts or ["The stage has no vectors"]
        return CheckOutcome(not wrong, listed(texts, _DESCRIBED, "; "), metadata)


@dataclass(frozen=True)
class Text(Check):
    """The share of texts that are empty, or nothing but white space.

    Attributes:
        max_empty_rate: The largest share, of the texts that are not null.
        columns: The columns to check. Default: all text columns except the ids.
    """

    fix: ClassVar[str] = "vd.checks.Text(max_empty_rate) sets the limit"

    max_empty_rate: float = 0.5
    columns: Sequence[str] | None = None
    severity: Severity = field(default="WARN", kw_only=True)

    _bounds: ClassVar[Mapping[str, float]] = {"max_empty_rate": 1}

    def fit(self, schema: pa.Schema, location: str) -> None:
        self._require(schema, location, self.columns, is_text, "texts")

    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Compare the share of empty texts in each column with the largest allowed.

        Raises:
            DefinitionError: If a column does not exist, or has no texts.
        """
        columns = _columns(self, self.columns, context, is_text)
        statistics, rows = context.statistics(columns), context.counts.rows
        rates = {n: _share(statistics[n].empty, rows - statistics[n].nulls) for n in columns}
        return _by_column(rates, self.max_empty_rate, "empty_rate", "empty texts", rows)


@dataclass(frozen=True)
class PackagesUnchanged(Check):
    """Stored rows were computed with the current versions of packages.

    Versions are not part of a fragment key, so an upgrade recomputes nothing by itself. Each part
    records the versions, installed in the workers, of the packages that the stage's code
    imports. `Reproducible` can then show whether an upgrade changes results.
    """

    fix: ClassVar[str] = "Materialize with force to compute the rows with the current versions"

    severity: Severity = field(default="WARN", kw_only=True)

    lasting: ClassVar[bool] = False

    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Compare the recorded versions with the current ones."""
        packages = context.packages
        changed = [package for package in packages if package.outdated]
        metadata: dict[str, Any] = {"packages_changed": len(changed)}
        texts = []
        for each in changed:
            then, now = " and ".join(each.outdated), " and ".join(each.current)
            metadata |= {f"then/{each.name}": then, f"now/{each.name}": now}
            texts.append(f"{each.name} is {now} but was {then} when stored rows were computed")
        if texts:
            return CheckOutcome(False, listed(texts, _DESCRIBED, "; "), metadata)
        described = "Packages have the versions that the rows were computed with"
        return CheckOutcome(True, described, metadata)


@dataclass(frozen=True)
class Findings(Check):
    """A default check: the findings of several checks.

    Attributes:
        findings: The checks. Each can be declared as a separate check.
    """

    findings: tuple[Check, ...] = ()

    @property
    def description(self) -> str:
        return "; ".join(f"{each.name}: {each.description}" for each in self.findings)

    @property
    def lasting(self) -> bool:  # type: ignore[override]  # depends on the findings
        return all(each.lasting for each in self.findings)

    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Evaluate all findings. The description names those that failed, and the fix of each."""
        outcomes = [(each, each.evaluate(context)) for each in self.findings]
        failed = [
            f"{each.name}: {result.description}. {each.fix}"
            for each, result in outcomes
            if not result.passed
        ]
        metadata: dict[str, Any] = {
            "findings": [
                {"finding": each.name, "passed": result.passed, "description": result.description}
                for each, result in outcomes
            ]
        }
        for _, result in outcomes:
            metadata |= result.metadata
        passed = f"Passed: {', '.join(each.name for each in self.findings)}"
        return CheckOutcome(not failed, "; ".join(failed) or passed, metadata)


def findings_of(checks: Iterable[Check]) -> Iterator[Check]:
    """Yield checks, and in place of a default check its findings."""
    for check in checks:
        yield from check.findings if isinstance(check, Findings) else (check,)


def has_lost_rows(name: str, metadata: Mapping[str, Any]) -> bool:
    """Return whether a failed check has found lost or invented rows."""
    is_accounting = name in (ROWS, "ids_complete")
    return is_accounting and bool(metadata.get("lost") or metadata.get("invented"))


def has_too_many_failed_rows(metadata: Mapping[str, Any]) -> bool:
    """Return whether a check has found more failed rows than may fail."""
    failed = metadata.get("quarantined", 0) + metadata.get("nulled", 0)
    return bool(failed > metadata.get("max_failed_rows", math.inf))


def merge(
    defaults: Sequence[Check], given: Sequence[CheckLike], location: str
) -> tuple[Check, ...]:
    """Merge a stage's default checks with the checks that the user declares."""
    seen = set()
    for each in given if isinstance(given, Sequence) else (None,):
        if not isinstance(each, (Check, Off)):
            expected = "a list of checks, such as [vd.checks.NullRate(0.1), vd.checks.Off('text')]"
            raise unexpected(location, "checks", given, expected)
        if each.name in seen:
            raise DefinitionError(
                f"{location}: two checks are named {each.name!r}; give one another name="
            )
        seen.add(each.name)
    default_names = [each.name for each in (*defaults, *findings_of(defaults))]
    for each in given:
        if isinstance(each, Off) and each.name not in default_names:
            raise DefinitionError(
                f"{location}: Off({each.name!r}) turns off no check; the stage has by default "
                f"{', '.join(map(repr, default_names))}"
            )
    kept = []
    for check in defaults:
        left = tuple(each for each in findings_of([check]) if each.name not in seen)
        if check.name not in seen and left:
            kept.append(replace(check, findings=left) if isinstance(check, Findings) else check)
    return (*kept, *(each for each in given if isinstance(each, Check)))


def defaults_for(
    columns: pa.Schema | None, kind: str, max_error_rate: float | None = None
) -> tuple[Findings, ...]:
    """Return the default checks of a stage: `rows`, which blocks, and `quality`, which warns."""
    rows: list[Check] = [IdsComplete(), ErrorRate(max_error_rate)]
    quality: list[Check] = [PackagesUnchanged()] if kind == "map_batches" else []
    if columns is None or len(columns):
        quality.append(NullRate())
    is_inferred = columns is None and kind == "map_batches"
    if kind == "embed" or is_inferred or any(is_vectors(f.type) for f in columns or ()):
        rows.append(Vectors())
    if any(is_text(f.type) for f in columns or ()):
        quality.append(Text())
    checks = [Findings(tuple(rows), name=ROWS, blocking=True)]
    if quality:
        checks.append(Findings(tuple(quality), name=QUALITY, severity="WARN"))
    return tuple(checks)


def _by_column(
    rates: Mapping[str, float], limit: float, measure: str, what: str, rows: int
) -> CheckOutcome:
    """Return the outcome of rates of `what`, such as nulls, by column."""
    above = [name for name, rate in rates.items() if rate > limit]
    shown = sorted(rates, key=lambda name: -rates[name])[:_SHOWN]
    metadata = {"rows": rows, **{f"{measure}/{name}": rates[name] for name in shown}}
    if not rates:
        return CheckOutcome(True, f"The stage has no column to check for {what}", metadata)
    messages = [
        f"{name}: {_percent(rates[name])} {what}; the limit is {_percent(limit)}"
        for name in above or shown[:1]
    ]
    return CheckOutcome(not above, listed(messages, _DESCRIBED, "; "), metadata)


def _columns(
    check: Check,
    given: Sequence[str] | None,
    context: CheckContext,
    is_kind: Callable[[pa.DataType], bool] = lambda kind: True,
) -> list[str]:
    """Return the columns that a check reads."""
    check.fit(context.schema, "the partition")
    if given:
        return list(given)
    without = (*context.keys, ERROR_COLUMN)  # null in each row that did not fail
    kinds = ((each.name, each.type) for each in context.schema)
    # The usage of prompts is not the user's data, and null where a join has no answer.
    return [n for n, kind in kinds if n not in without and kind != USAGE and is_kind(kind)]


def _counted(counts: PartCounts) -> dict[str, int]:
    """Return the counts as metadata."""
    return {n: count for n, count in asdict(counts).items() if count or n != "unread"}


def _share(count: float, rows: float) -> float:
    return count / rows if rows else 0.0


def _percent(share: float) -> str:
    """Format a share, such as ``1%`` or ``3.846%``."""
    return f"{100 * share:.4g}%"
