"""The usage of each answer, and the cost of a partition or run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster._texts import amount
from vane_dagster.providers.base import Answer
from vane_dagster.providers.batch_api import PRICE

USAGE = pa.struct(
    [
        pa.field("requests", pa.int64()),
        pa.field("prompt_tokens", pa.int64()),
        pa.field("completion_tokens", pa.int64()),
        pa.field("cached_tokens", pa.int64()),
        pa.field("finish_reason", pa.string()),
        pa.field("seconds", pa.float64()),
        pa.field("batch_requests", pa.int64()),
        pa.field("reasoning_tokens", pa.int64()),
    ]
)
"""Usage of an answer: requests, tokens, finish reason, and seconds from first request to end.

The requests that a batch has answered, at a lower price, and the tokens of reasoning, which are
among those of completions, are counted at last.
"""

COUNTS = (
    "requests", "batch_requests", "prompt_tokens", "completion_tokens", "cached_tokens",
    "reasoning_tokens",
)  # fmt: skip
"""The counts of `USAGE` and `Answer` that are summed for each part."""
PRICED = {"prompt", "completion", "cached"}
"""The kinds of tokens that have a price."""
_MILLION = 1e6


def token_count(value: Any, *path: str) -> int:
    """Return a count in an endpoint's response; 0 for anything but a whole number."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    number = isinstance(value, (int, float, np.integer)) and not isinstance(value, bool)
    return int(value) if number and 0 <= value < 2**63 and value == int(value) else 0


def finish_reason(value: Any) -> str:
    """Return a finish reason in an endpoint's response; empty for anything but text."""
    return value if isinstance(value, str) else ""


def checked_usage(answer: Answer) -> Answer:
    """Return a provider's answer with the usage that `USAGE` holds, 0 and "" for anything else.

    Reasoning is text as Arrow holds it, or None.
    """
    values: dict[str, Any] = {name: token_count(getattr(answer, name)) for name in COUNTS}
    text = answer.reasoning if isinstance(answer.reasoning, str) else ""
    values["reasoning"] = text.encode(errors="replace").decode() or None
    return replace(answer, finish_reason=finish_reason(answer.finish_reason), **values)


def usage_column(answers: Sequence[Answer]) -> pa.Array:
    """Return the usage of answers as a column of `USAGE`."""
    values = [{field.name: getattr(answer, field.name) for field in USAGE} for answer in answers]
    return pa.array(values, USAGE)


def counted(answer: Answer) -> dict[str, int]:
    """Return the usage of an answer, by the names of `COUNTS`."""
    return {name: getattr(answer, name) for name in COUNTS}


def spent_on(tables: Sequence[pa.Table], failed: Mapping[str, int]) -> Counter[str]:
    """Return the usage of the answers in rows and of rows that failed, by the names of `COUNTS`.

    The tables have one schema.
    """
    spent = Counter(failed)
    columns = [each.name for each in tables[0].schema if each.type.equals(USAGE)] if tables else ()
    for table in tables if columns else ():
        for column in map(table.column, columns):
            spent.update({n: pc.sum(pc.struct_field(column, n)).as_py() or 0 for n in COUNTS})
    return spent


@dataclass(frozen=True)
class UsageAccount:
    """The usage of a stage's answers, with its prices and budgets.

    Attributes:
        column: The column of `USAGE`.
        prices: The price of a million tokens by kind.
        token_budget: Tokens that a run may use.
        cost_budget: The cost that a run may have.
        in_batches: Whether most answers will be those of batches, for estimates.
        per_minute: The limits of live requests that all workers share, by the name of the option.
    """

    column: str
    prices: Mapping[str, float]
    token_budget: int | None = None
    cost_budget: float | None = None
    in_batches: bool = False
    per_minute: Mapping[str, float] = field(default_factory=dict)

    @property
    def sums(self) -> Mapping[str, Sequence[str]]:
        """The fields of struct columns that are summed for each part, among its measures."""
        return {self.column: COUNTS}

    @property
    def has_budget(self) -> bool:
        """Whether a run may use only so much."""
        return self.token_budget is not None or self.cost_budget is not None

    def used(self, measures: Mapping[str, Mapping[str, float]]) -> Counter[str]:
        """Return the usage of rows, by the names of `COUNTS`."""
        counts = measures.get(self.column, {})
        return Counter({name: int(counts.get(name, 0)) for name in COUNTS})

    def over_budget(self, used: Mapping[str, int]) -> str | None:
        """Describe the budget of a run that is exhausted or unknown; None if there is none."""
        tokens = used["prompt_tokens"] + used["completion_tokens"]
        budget, limit = self.token_budget, self.cost_budget
        if not tokens and used["requests"] and self.has_budget:
            return "its answers have no token counts, which its budget needs; remove the budget"
        if budget is not None and tokens >= budget:
            return f"this run has used {tokens} tokens, token_budget={budget}"
        paid = self.cost(used)
        if limit is not None and paid >= limit:
            return f"this run has cost {amount(paid, 6)}, cost_budget={amount(limit, 6)}"
        return None

    def metadata(self, used: Mapping[str, int]) -> dict[str, Any]:
        """Return the usage of a partition's answers as metadata of its asset."""
        figures: dict[str, Any] = dict(used)
        if used["prompt_tokens"]:
            figures["cache_hit_rate"] = round(used["cached_tokens"] / used["prompt_tokens"], 4)
        if self.prices:
            figures["cost"] = round(self.cost(used), 6)
        return figures

    def partial(self, kind: str, used: Mapping[str, int]) -> dict[str, Any]:
        """Return a part of a partition's usage as metadata, with its cost."""
        metadata = self.metadata(used)
        return {f"{n}_{kind}": value for n, value in metadata.items() if n in (*COUNTS, "cost")}

    def expected_cost(self, used: Mapping[str, float]) -> float:
        """Return what tokens would cost if a run used them now."""
        in_batches = used["requests"] if self.in_batches else 0
        return self.cost({**used, "batch_requests": in_batches})

    def cost(self, used: Mapping[str, float]) -> float:
        """Return the cost of tokens. Without a "cached" price, cached tokens cost as others do.

        Requests of batches and others share the tokens evenly.
        """
        prices = self.prices
        share = used.get("batch_requests", 0) / max(1, used.get("requests", 0))
        cached = used["cached_tokens"] if "cached" in prices else 0
        fresh = used["prompt_tokens"] - cached
        return (
            (
                fresh * prices.get("prompt", 0.0)
                + cached * prices.get("cached", 0.0)
                + used["completion_tokens"] * prices.get("completion", 0.0)
            )
            * (1 - (1 - PRICE) * share)
            / _MILLION
        )
