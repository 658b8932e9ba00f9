"""Checks of a stage's rows, for ``checks=[...]``: thresholds of those by default, and more.

Every stage has `IdsComplete` and `ErrorRate`; one that makes columns has `NullRate`, and `Vectors`
and `Text` where there are any. A check that is given replaces the default of its name; `Off`
removes it.
"""

from vane_dagster.declare.check import Check, CheckLike, Off
from vane_dagster.declare.checks import ErrorRate, IdsComplete, NullRate, Text, Vectors
from vane_dagster.declare.comparisons import Drift, Golden

__all__ = [
    "Check",
    "CheckLike",
    "IdsComplete",
    "ErrorRate",
    "NullRate",
    "Vectors",
    "Text",
    "Drift",
    "Golden",
    "Off",
]
