"""Checks of the arguments of methods that add a stage."""

from __future__ import annotations

from typing import Any

from vane_dagster._keywords import RECORD_OF, F, full_signature, known_keywords

_INFER = 'Declare the columns, such as schema={"label": "VARCHAR"}, or write schema="infer"'

SAMPLING = {
    name: f'write sampling_params={{"{name}": ...}}'
    for name in ("temperature", "max_tokens", "top_p", "top_k", "stop", "seed")
}
"""How to write a parameter of an answer."""

_RAY_DATA = {
    "compute": ("concurrency", "write concurrency=N, or concurrency=(min, max)"),
    "num_gpus": ("gpus", "write gpus=..."),
    "fn_args": ("fn_kwargs", 'write fn_kwargs={"parameter": value}'),
    "zero_copy_batch": ("batch_format", "leave it out; each call gets its own copy of its batch"),
    "expr": ("fn", "write rows.project(name, columns, where=...), in SQL"),
    "runtime_env": (
        "concurrency",
        "write vd.RayCompute(address=..., ray_init_options={'runtime_env': {...}}), for all stages "
        "of a run; for variables, concurrency=vd.Workers(env_vars=[...])",
    ),
}
"""Arguments of Ray Data: an argument of the methods that can do the same, and how."""


def adds_stage(function: F) -> F:
    """Decorate a method that adds a stage so that it describes missing and unknown arguments."""
    taken = tuple(full_signature(function).parameters)
    written = tuple(f"write {argument}=" for argument in taken)
    fields = {
        field: how
        for field, how in RECORD_OF.items()
        if field not in taken and how.startswith(written)
    }
    fields |= {name: how for name, (needed, how) in _RAY_DATA.items() if needed in taken}
    provider = "; those of its provider go into model=vd.Model(..., options={...})"

    def where(rows: Any, *args: Any, **kwargs: Any) -> str:
        return f"{rows.pipeline._location(kwargs.get('name', next(iter(args), '?')))}: "

    return known_keywords(
        function.__name__,
        {"schema": _INFER, **fields, **(SAMPLING if "sampling_params" in taken else {})},
        provider if "model" in taken else "",
        where,
    )(function)
