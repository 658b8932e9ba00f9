"""Models that a module loads when it is imported.

They work, but each process that imports the module loads them: the code location, each run, and
each worker, also of stages that never use them. A class that loads them in its constructor is
constructed once in each worker of its own pool.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from vane_dagster.fingerprint.module_attributes import module_attribute
from vane_dagster.fingerprint.values import model_class


def models_on_import(modules: Iterable[str]) -> Iterator[str]:
    """Yield a text for each loaded model among the variables of modules; nothing is imported."""
    seen: set[int] = set()
    for module in modules:
        variables = module_attribute(sys.modules.get(module), "__dict__") or {}
        for name, value in sorted(variables.items()):
            if id(value) not in seen and (kind := model_class(value)):
                seen.add(id(value))
                yield (
                    f"{module}.{name} is a {kind} that is loaded when the module is imported, by "
                    "every process that imports it: the code location, each run, and workers of "
                    "other stages. Load it in the __init__ of a class, once in each worker, where "
                    "it stays warm between runs; call it in the class's __call__, and pass the "
                    "class in place of a function"
                )
