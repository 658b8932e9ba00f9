"""The functions of a simulated pipeline. Their calls are noted in the world, which they can end."""

from __future__ import annotations

import types
from types import SimpleNamespace


def world() -> SimpleNamespace:
    """Return `calls`, a list, and `worker_died`, a bool.

    A worker may import this module a second time, so they are kept in a module that it does not.
    """
    if not hasattr(types, "simulated_world"):
        types.simulated_world = SimpleNamespace(calls=[], worker_died=False)
    return types.simulated_world


def noted(stage: str, value: str) -> str:
    """Note a call. Values name the stages that fail for them, and that they kill the worker of."""
    shared = world()
    if shared.worker_died:
        raise RuntimeError("a dead worker does nothing")
    shared.calls.append((stage, value))
    if f"kill {stage}" in value:
        shared.worker_died = True
        raise RuntimeError("the worker dies")
    if f"bad {stage}" in value:
        raise ValueError("a poison row")
    return value


def labelled(value: str, stage: str, suffix: str) -> str:
    return f"{noted(stage, value)}{suffix}"


def pieces(value: str, stage: str, suffix: str) -> list[str]:
    return [f"{piece}{suffix}" for piece in noted(stage, value).split("+") if piece]


def is_kept(value: str, stage: str, suffix: str) -> bool:
    return (len(noted(stage, value)) + len(suffix)) % 3 > 0
