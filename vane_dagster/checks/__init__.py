"""Checks of a stage's rows, for ``checks=[...]``: thresholds of those by default, and more.

Every stage has `IdsComplete` and `ErrorRate`; one that runs a function or a model has
`PackagesUnchanged`; one that makes columns has `NullRate`, and `Vectors` and `Text` where there are
any. A check that is given replaces the default of its name; `Off`
removes it. `Reproducible`, which computes rows again, is evaluated when it is executed, all others
when a partition is committed.
"""

from vane_dagster.checks.base import Check, CheckLike, Off
from vane_dagster.checks.builtin import (
    ErrorRate,
    IdsComplete,
    NullRate,
    PackagesUnchanged,
    Text,
    Vectors,
)
from vane_dagster.checks.comparisons import Drift, Golden
from vane_dagster.checks.reproducible import Reproducible

__all__ = [
    "Check",
    "CheckLike",
    "IdsComplete",
    "ErrorRate",
    "NullRate",
    "PackagesUnchanged",
    "Vectors",
    "Text",
    "Drift",
    "Golden",
    "Reproducible",
    "Off",
]
