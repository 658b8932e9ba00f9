"""A user's function that makes the prompt of a row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vane_dagster.errors import names

_SAMPLING = "sampling_params"
"""The key of what it returns that has the sampling parameters of its row, as in `ray.data.llm`."""


@dataclass(frozen=True)
class PromptFunction:
    """The function of a prompt stage.

    Attributes:
        call: Returns the prompt of a row.
    """

    call: Callable[[dict[str, Any]], Any]

    @property
    def is_preloaded(self) -> bool:
        """Whether it runs only in a worker that has its modules; see `PromptTask`."""
        return True

    def prompt(self, row: dict[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Make the prompt of a row."""
        made = self.call(row)
        if isinstance(made, (str, list)):
            return made, {}
        if not isinstance(made, Mapping):
            raise ValueError(
                f"the function of the prompt returned a {type(made).__name__}; expected text, a "
                "list of messages, or a dict"
            )
        sampling = made.get(_SAMPLING) or {}
        if not isinstance(sampling, Mapping):
            raise ValueError(
                f"the function of the prompt returned a {type(sampling).__name__} as "
                f"{_SAMPLING!r}; expected a dict"
            )
        for name in ("messages", "prompt"):
            if made.get(name) is not None:
                return made[name], sampling
        raise ValueError(
            f"the function of the prompt returned a dict of {names(made, 20)}; expected 'messages' "
            "or 'prompt' in it"
        )


@functools.lru_cache(maxsize=64)
def unpacked(payload: bytes) -> Any:
    """Load code that was pickled by value, once a worker, so that its caches last."""
    import cloudpickle

    return cloudpickle.loads(payload)
