"""Budgets of stages: what their parts have used, and when a run stops."""

from __future__ import annotations

from collections import Counter
from typing import Any

import dagster as dg
import pytest

import vane_dagster as vd
from support.in_process import InProcessCompute
from support.prompts import docs
from support.results import entries
from vane_dagster.engine.token_budget import TokenBudget
from vane_dagster.errors import VaneError
from vane_dagster.orchestration.metadata import stage_metadata
from vane_dagster.providers.base import Answer, Request
from vane_dagster.providers.usage import UsageAccount
from vane_dagster.storage.manifest import PartInfo

USED = {"requests": 2, "prompt_tokens": 40, "completion_tokens": 10, "cached_tokens": 20}
PRICES = {"prompt": 1.0, "cached": 0.5, "completion": 2.0}


def part(**counts: int) -> PartInfo:
    return PartInfo("k" * 40, "d", 1, 1, measures={"asked_usage": counts})


@pytest.fixture
def pipeline() -> vd.Pipeline:
    made = vd.Pipeline("p", source=vd.parquet("rows.parquet"), id="id")
    made.project("clean", ["text"]).prompt(
        "asked", "{text}", provider="openai", model=vd.Model("m", token_budget=60)
    )
    return made


def test_a_budget_that_is_used_up_is_told_once(pipeline):
    spending = TokenBudget(pipeline)
    assert spending.record("asked", Counter(prompt_tokens=40)) is None
    error = spending.record("asked", Counter(prompt_tokens=15, completion_tokens=5))
    assert "stage 'p/asked': this run has used 60 tokens, token_budget=60" in str(error)
    assert spending.record("asked", Counter(prompt_tokens=40)) is None


def test_the_plans_of_a_run_share_its_budget(pipeline):
    used: dict[str, Counter[str]] = {}
    assert TokenBudget(pipeline, used).record("asked", Counter(prompt_tokens=40)) is None
    later = TokenBudget(pipeline, used)
    assert later.record("asked", Counter(prompt_tokens=40)) is not None
    assert TokenBudget(pipeline, used).record("asked", Counter(prompt_tokens=1)) is not None
    assert later.record("asked", Counter(prompt_tokens=40)) is None


def test_fragments_begin_if_the_budget_has_room_for_all_in_flight(pipeline):
    spending = TokenBudget(pipeline)

    def may_begin(rows: int, in_flight: int) -> bool:
        return spending.may_begin("asked", rows, lambda: in_flight)

    assert may_begin(1000, 0)
    assert not may_begin(1, 1), "nothing is known yet"
    spending.ended("asked", part(), 1000)
    assert not may_begin(1, 1), "rows that are copied say nothing"
    spending.record("asked", Counter(requests=200, prompt_tokens=20))  # of several rows of each
    assert not may_begin(1, 1), "the fragment has not ended"
    spending.ended("asked", part(requests=200, prompt_tokens=20), 4)
    assert may_begin(4, 3)
    assert not may_begin(4, 4)
    assert may_begin(1000, 0)
    assert spending.may_begin("clean", 1000, lambda: 1000)


def test_stages_without_a_budget_use_nothing(pipeline):
    assert TokenBudget(pipeline).record("clean", Counter(prompt_tokens=1000)) is None


def test_costs_count_by_the_million_and_cached_tokens_have_their_own_price():
    def over_budget(*budgets: float | None) -> str | None:
        return UsageAccount("u", PRICES, *budgets).over_budget(USED)  # type: ignore[arg-type]  # a tuple

    assert over_budget(None, None) is None
    assert over_budget(51, 50.1e-6) is None
    assert over_budget(None, 50e-6) == "this run has cost 0.00005, cost_budget=0.00005"


def test_a_budget_needs_answers_that_say_their_tokens():
    silent = Counter(requests=3)
    assert UsageAccount("u", PRICES).over_budget(silent) is None
    assert UsageAccount("u", PRICES, 51).over_budget(Counter()) is None
    for budgets in ((51, None), (None, 1.0)):
        message = UsageAccount("u", PRICES, *budgets).over_budget(silent)
        assert "no token counts" in str(message)


def test_metadata_has_shares_and_costs_where_they_are_known():
    free, priced = UsageAccount("u", {}), UsageAccount("u", PRICES)
    assert free.metadata(USED) == {**USED, "cache_hit_rate": 0.5}
    assert priced.metadata(USED) == {**USED, "cache_hit_rate": 0.5, "cost": 50e-6}
    assert free.metadata(dict.fromkeys(USED, 0)) == dict.fromkeys(USED, 0)


class Echo:
    """Answers with one word more than it is asked, of which one is cached."""

    OPERATIONAL = frozenset({"notes"})

    def __init__(self, model: str, *, notes: str) -> None:
        self.notes = notes

    async def submit(self, request: Request) -> Answer:
        text = request.messages[-1]["content"]
        with open(self.notes, "a") as file:
            file.write(f"{text}\n")
        return Answer(f"echo: {text}", len(text.split()), len(text.split()) + 1, 1)


def test_costs_and_budgets_count_what_is_spent_and_what_is_copied(tmp_path):
    notes, store = tmp_path / "notes", vd.FragmentStore(root=str(tmp_path / "store"))
    prices = {"prompt": 2e6, "completion": 10e6, "cached": 1e6}

    def declared(texts: list[str], token_budget: int) -> vd.Pipeline:
        pipeline = docs(tmp_path, texts)
        pipeline.fragment_rows = 4
        given = {"options": {"notes": str(notes)}, "prices": prices, "token_budget": token_budget}
        pipeline.prompt(
            "asked", "{text}", provider=Echo, model=vd.Model("m", **given), batch_size=4,
            sampling_params={"temperature": 0},
        )  # fmt: skip
        return pipeline

    def run(pipeline: vd.Pipeline) -> dict[str, Any]:
        """The metadata of the stage in Dagster."""
        notes.write_text("")
        pipeline.run(store=store, compute=InProcessCompute())
        opened = store.open()
        manifest, spec = opened.in_force("docs", "asked", None), pipeline["asked"].spec
        version = opened.latest("docs", "asked", [None])[None]
        return entries(stage_metadata(spec, manifest, version, opened, 1))

    # What a run spends.
    texts = [f"text number {i}" for i in range(40)]
    first = run(declared(texts, 10_000))
    words = 40 * 3
    tokens = [first[name] for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
    assert tokens == [words, words + 40, 40]
    assert first["cache_hit_rate"] == pytest.approx(1 / 3, abs=1e-4)
    assert first["tokens_per_second"] > 0
    assert first["cost"] == pytest.approx((words - 40) * 2 + 40 * 1 + (words + 40) * 10)
    assert (first["rows_computed"], first["cost_of_answers"]) == (40, first["cost"])
    assert "cost_inherited" not in first

    # Rows that are copied cost nothing, and need no budget.
    texts[5], texts[6] = "another text", "another text"
    again = run(declared(texts, 30))
    assert notes.read_text() == "another text\n"
    assert again["requests_spent"] == again["rows_computed"] == 1
    spent = again["completion_tokens_spent"] + again["completion_tokens_inherited"]
    assert again["completion_tokens"] == spent
    assert again["cost_of_answers"] == again["cost"] + again["cost_inherited"]

    # A run that has used its budget stops, and keeps what is paid for.
    texts += [f"another number {i}" for i in range(40)]
    pipeline, sent = declared(texts, 60), Counter[str]()
    for _ in range(2):
        with pytest.raises(VaneError, match="tokens, token_budget=60"):
            run(pipeline)
        sent.update(asked := notes.read_text().splitlines())
        assert 8 <= len(asked) <= 12, "by less than a fragment"
    assert max(sent.values()) == 1, "nothing is paid for twice"


def test_a_budget_counts_the_answers_of_partitions_that_fail(tmp_path):
    notes, days = tmp_path / "notes", [f"d{n:02}" for n in range(10)]
    texts = [(day, text) for day in days for text in ("a b", "a b", "a b", "wrong b")]
    rows = [{"id": n, "day": day, "text": text} for n, (day, text) in enumerate(texts)]
    source, keys = vd.table(rows, partition_column="day"), dg.StaticPartitionsDefinition(days)
    pipeline = vd.Pipeline("docs", source=source, id="id", partitions_def=keys)
    pipeline.prompt(
        "asked", "{text}", provider=Echo, return_format=["echo: a b"], reuse="fragments",
        model=vd.Model("m", {"notes": str(notes)}, token_budget=60),
    )  # fmt: skip
    with pytest.raises(VaneError, match="token_budget=60"):
        pipeline.run(days, store=str(tmp_path / "store"), compute=InProcessCompute())
    assert 12 <= len(notes.read_text().splitlines()) <= 16, "of 5 tokens each"
