"""The run config of a pipeline.

Dagster inspects the annotations of configs at runtime, so this module does not postpone their
evaluation.
"""

from collections.abc import Mapping

import dagster as dg
from pydantic import Field


class RunOptions(dg.Config):
    """Run config of a pipeline, editable in Dagster's launchpad."""

    force: bool = Field(
        default=False,
        description=(
            "Compute the selected stages again, whatever the store holds. Later runs copy no older "
            "results. Dagster's automatic retries and a re-execution from failure resume the run."
        ),
    )
    retry_quarantined: bool = Field(
        default=False,
        description=(
            "Retry the rows that failed, with reuse='fragments' their fragments, and recompute "
            "their downstream rows."
        ),
    )
    continues: str | None = Field(
        default=None,
        description=(
            "The run that this one goes on with: the sensor sets the run whose batches have ended. "
            "With force or retry_quarantined, what that run has computed is not computed again."
        ),
    )
    wait: bool = Field(
        default=False,
        description=(
            "Wait for the answers of batches (models with mode='batch') without holding workers. "
            "Default: submit them and end; a later run continues."
        ),
    )
    max_gpu_hours: float | None = Field(
        default=None,
        ge=0,
        description="Compute nothing if `plan` expects that more GPU hours are possible.",
    )
    max_cost: float | None = Field(
        default=None,
        ge=0,
        description="Likewise for the price of tokens, for models with prices.",
    )
    adopt: list[str] = Field(
        default_factory=list,
        description=(
            "Stages whose edit changes no result: before the run, a sample of their stored rows is "
            "compared, like `vane-dagster adopt`. If a row differs, nothing is computed."
        ),
    )
    adopt_rows: int = Field(
        default=200, ge=0, description="Rows of each that are compared. 0: none."
    )
    adopt_tolerance: float = Field(
        default=0.0, ge=0, description="The largest difference of floating-point numbers."
    )
    reproduce_partitions: list[str] = Field(
        default_factory=list,
        description=(
            "Partitions from which a Reproducible check recomputes rows. Default: those of the "
            "run, or four at random."
        ),
    )

    @property
    def limits(self) -> Mapping[str, float | None]:
        """The most that the run may take, by the name of the limit."""
        return {"max_gpu_hours": self.max_gpu_hours, "max_cost": self.max_cost}
