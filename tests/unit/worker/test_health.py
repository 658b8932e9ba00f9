"""Models that are dead in a process that still runs."""

from __future__ import annotations

from typing import Any

import pytest

from support.udf_calls import IDS, call, row_stage, run_stage
from vane_dagster.worker.health import UnhealthyModelError
from vane_dagster.worker.retry import BatchError


class EngineDeadError(RuntimeError):
    """As of vLLM."""


def dead(n: Any) -> Any:
    raise EngineDeadError("the engine is dead")


async def dead_later(n: Any) -> Any:
    raise EngineDeadError("the engine is dead")


@pytest.mark.parametrize("fn", [dead, dead_later])
def test_an_error_that_means_a_dead_model_is_no_error_of_its_rows(fn):
    with pytest.raises(UnhealthyModelError, match="the engine is dead") as raised:
        call(fn, {"y": "BIGINT"})
    assert raised.value.rows
    assert not isinstance(raised.value.__context__, BatchError), "a fault of the task"
    with pytest.raises(UnhealthyModelError, match="the engine is dead"):
        run_stage(row_stage("map", fn, schema={"y": "BIGINT"}, on_error="quarantine"), IDS)


class Broken:
    """A model that an error has broken, as its own check says."""

    def __init__(self) -> None:
        self.is_broken = False

    def check_health(self) -> None:
        if self.is_broken:
            raise ConnectionError("no answer")


class BrokenBatch(Broken):
    def __call__(self, batch: Any) -> Any:
        self.is_broken = True
        raise ValueError("wrong")


class BrokenLater(Broken):
    async def __call__(self, batch: Any) -> Any:
        self.is_broken = True
        raise ValueError("wrong")


class CheckedLater(BrokenLater):
    async def check_health(self) -> None:  # type: ignore[override]  # as a model may have it
        super().check_health()


@pytest.mark.parametrize("model", [BrokenBatch, BrokenLater, CheckedLater])
def test_a_model_is_asked_after_an_error(model):
    with pytest.raises(UnhealthyModelError, match="no answer") as raised:
        call(model, {"y": "BIGINT"})
    assert raised.value.rows
