"""A user's functions of a row: what makes the prompt of a row, and what uses its answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from vane_dagster.errors import CostlyError, StageError, names
from vane_dagster.providers.base import Answer
from vane_dagster.providers.usage import counted
from vane_dagster.types.records import fields_of
from vane_dagster.types.to_arrow import to_arrow

ANSWER = "generated_text"
"""The field of a row that has the text of its answer, as in `ray.data.llm`."""
SAMPLING = "sampling_params"
"""The field of what `preprocess` returns that has the sampling parameters of its row."""
_MAX_SHOWN = 4000


class PostprocessError(CostlyError):
    """`postprocess` failed for a row; the message contains the text of the row's answer.

    Attributes:
        used: The answer's usage, by the names of `COUNTS`. It is charged nevertheless.
    """

    def __init__(self, problem: str, answer: Answer) -> None:
        super().__init__(f"{problem}. The answer: {answer.text[:_MAX_SHOWN]}")
        self.used = counted(answer)


@dataclass(frozen=True)
class RowFunctions:
    """The functions of a prompt stage.

    Attributes:
        preprocess: Makes the prompt of a row; None if a template does.
        postprocess: Makes the output columns of a row; None if the answer is the output.
    """

    preprocess: Callable[[dict[str, Any]], Any] | None = None
    postprocess: Callable[[dict[str, Any]], Any] | None = None

    @property
    def given(self) -> tuple[Callable[..., Any], ...]:
        """The functions that there are."""
        return tuple(each for each in (self.preprocess, self.postprocess) if each is not None)

    @property
    def preloaded(self) -> tuple[Callable[..., Any], ...]:
        """Those that run only in a worker which has their modules; see `ModelTask`."""
        return self.given


@functools.lru_cache(maxsize=64)
def unpacked(payload: bytes) -> RowFunctions:
    """Load functions that were pickled by value, once a worker, so that their caches last.

    Args:
        payload: The pickled functions.
    """
    import cloudpickle

    before, after = cloudpickle.loads(payload)
    return RowFunctions(before, after)


def processed(
    function: Callable[[dict[str, Any]], Any],
    row: dict[str, Any],
    answer: Answer,
    schema: pa.Schema,
) -> list[pa.Array]:
    """Call `postprocess` for a row.

    Args:
        function: The user's function.
        row: The row and its answer.
        answer: The answer.
        schema: The columns to make.

    Returns:
        An array of one value for each column.

    Raises:
        StageError: If the function raises it.
        PostprocessError: If it raises anything else, or its result does not fit the schema.
    """
    known = set(row)
    try:
        returned = function(row)
    except StageError:
        raise
    except BaseException as error:  # whatever a function raises is an error of its row
        raise PostprocessError(f"postprocess raised {_described(error)}", answer) from error
    try:
        made = fields_of(returned)
    except TypeError:
        raise PostprocessError(
            f"postprocess returned a {type(returned).__name__}; expected a dict of output columns",
            answer,
        ) from None
    if missing := [name for name in schema.names if name not in made]:
        raise PostprocessError(
            f"postprocess returned no {names(missing)}; it returned {names(made, 20)}", answer
        )
    if unknown := [name for name in made if name not in known and name not in schema.names]:
        raise PostprocessError(
            f"postprocess returned {names(unknown)}, which schema does not declare; it declares "
            f"{names(schema.names, 20)}",
            answer,
        )
    return [_value(made[field.name], field, answer) for field in schema]


def _value(value: Any, field: pa.Field, answer: Answer) -> pa.Array:
    try:
        return to_arrow([value], field.type)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise PostprocessError(
            f"postprocess returned a {type(value).__name__} as {field.name!r}, which schema "
            f"declares as {field.type}: {error}",
            answer,
        ) from error


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # an exception's text may run the user's code too
        return type(error).__name__


def prompt_of(made: Any, has_template: bool) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
    """Split what `preprocess` returned.

    Args:
        made: What it returned.
        has_template: Whether the stage has a template.

    Returns:
        A prompt or conversation, None for that of the template; fields to add to the row; and
        sampling parameters of the row's own.

    Raises:
        ValueError: If it returned nothing that makes a prompt.
    """
    if isinstance(made, (str, list)):
        return made, {}, {}
    if not isinstance(made, Mapping):
        raise ValueError(
            f"preprocess returned a {type(made).__name__}; expected text, a list of messages, or a "
            "dict"
        )
    sampling = made.get(SAMPLING) or {}
    if not isinstance(sampling, Mapping):
        raise ValueError(
            f"preprocess returned a {type(sampling).__name__} as {SAMPLING!r}; expected a dict"
        )
    if has_template:
        return None, made, sampling
    for name in ("messages", "prompt"):
        if made.get(name) is not None:
            return made[name], made, sampling
    raise ValueError(
        f"preprocess returned a dict of {names(made, 20)}; expected 'messages' or 'prompt' in it, "
        "since the stage has no template"
    )
