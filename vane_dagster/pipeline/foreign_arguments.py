"""Arguments that a stage does not take: those of other systems, and misspelt ones.

Nothing here is an alias. Each message has the line to write instead, with the value that was given
where it is a number, so that a call written for Ray Data, Daft, Spark or Vane is corrected in one
step.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from vane_dagster._keywords import similar
from vane_dagster.errors import DefinitionError, SchemaError, names
from vane_dagster.types import spark
from vane_dagster.types.annotations import arrow_type
from vane_dagster.types.schema import sql_name

_MISSPELT = 0.85
"""The similarity from which a name is taken for one of another system."""


@dataclass(frozen=True)
class StageCall:
    """The call of a method that adds a stage, or another call with options.

    Attributes:
        method: The method's name.
        options: Its own options.
        nested: Options that go into a mapping, by the name of the option that takes it.
        adds_stage: Whether it adds a stage. Advice about stages is only for those that do.
        elsewhere: Options of related calls, and these calls.
        more: What takes further options, for messages.
    """

    method: str
    options: tuple[str, ...]
    nested: Mapping[str, Collection[str]] = field(default_factory=dict)
    adds_stage: bool = True
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    more: str = ""


def stage_call(
    *methods: Callable[..., Any], nested: Mapping[str, Collection[str]] | None = None
) -> StageCall:
    """Describe the call of a method by its keyword-only parameters.

    Args:
        *methods: The method, then others that its further options go to.
        nested: See `StageCall`.
    """
    parameters = [each for m in methods for each in inspect.signature(m).parameters.values()]
    own = (each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
    return StageCall(methods[0].__name__, tuple(dict.fromkeys(own)), nested or {})


def unknown_arguments(
    call: StageCall, unknown: Mapping[str, Any], others: Collection[str] = ()
) -> str:
    """Describe unknown arguments, each with the line to write or the names that are similar.

    Args:
        call: The call.
        unknown: The arguments and their values.
        others: Further arguments that the method passes on.
    """
    return "\n".join(
        f"unknown argument {name!r} of {call.method}{_correction(call, name, value, others)}"
        for name, value in sorted(unknown.items())
    )


def misplaced_option(call: StageCall, name: str, value: Any, known: Collection[str]) -> str:
    """Say what to write for an option in a mapping that does not take it.

    Args:
        call: The call, whose own option it may be.
        name: The option.
        value: Its value.
        known: The options that the mapping takes.

    Returns:
        A sentence that begins with a full stop; empty if nothing is known.
    """
    if found := similar(name, known):
        return f". {found}"
    if name in call.options:
        return f". {name!r} is an argument of {call.method}: write {name}={_shown(value)} there"
    written = _advice(call, name, value)
    return f". {name!r} is known from {_FOREIGN[name].system}: {written}" if written else ""


def check_value(location: str, name: str, value: Any) -> None:
    """Check that an argument does not have a value that only another system knows.

    Args:
        location: The stage, for messages.
        name: The argument's name, for messages.
        value: The value.

    Raises:
        DefinitionError: If it has. The message has the value to write.
    """
    foreign = _FOREIGN_VALUES.get((name, value)) if isinstance(value, str) else None
    if foreign is not None:
        system, written = foreign
        raise DefinitionError(
            f"{location}: {name} is {value!r}, a value of {system}: write {written}"
        )


def _advice(call: StageCall, name: str, value: Any) -> str | None:
    """Return what to write in place of another system's argument; None if it is not known."""
    if (known := _FOREIGN.get(name)) is None:
        return None
    if not call.adds_stage and not (isinstance(known.write, _Renamed) and known.write.of(call)):
        return None
    return known.write(call, name, value)


def _correction(call: StageCall, name: str, value: Any, others: Collection[str]) -> str:
    for option, inner in call.nested.items():
        if name in inner:
            return f': write {option}={{"{name}": {_shown(value)}}}'
    if name in call.elsewhere:
        return f": write {name}={_shown(value)} at {call.elsewhere[name]}"
    if (written := _advice(call, name, value)) is not None:
        return f", known from {_FOREIGN[name].system}: {written}"
    known = [*call.options, *others]
    nearest = difflib.get_close_matches(name.lower(), [*known, *_FOREIGN], 1, _MISSPELT)
    if nearest and nearest[0] not in known and (written := _advice(call, nearest[0], value)):
        return f". Did you mean {nearest[0]!r} of {_FOREIGN[nearest[0]].system}: {written}"
    if found := similar(name, known):
        return f". {found}"
    own = f"its options are {names(call.options, 50)}" if call.options else "it has no options"
    further = f"; those of its Dagster asset are {names(others, 20)}" if others else ""
    return f": {own}{further}{call.more}"


def _shown(value: Any) -> str:
    """Show a number; other values may hold secrets, or be long."""
    if isinstance(value, (tuple, list)) and value and all(type(each) is int for each in value):
        return repr(value)
    if isinstance(value, bool) or value is None:
        return repr(value)
    return f"{value:.15g}" if isinstance(value, (int, float)) else "..."


_Write = Callable[[StageCall, str, Any], str]


@dataclass(frozen=True)
class _Foreign:
    system: str
    write: _Write


def _leave_out(why: str) -> _Write:
    return lambda call, name, value: f"leave it out; {why}"


@dataclass(frozen=True)
class _Renamed:
    """Advises the first of our options that the method has.

    Attributes:
        ours: Our options, the preferred one first.
        zero: Whether 0 and None are the same as leaving the option out.
    """

    ours: tuple[str, ...]
    zero: bool

    def of(self, call: StageCall) -> str | None:
        """Return the option of a method; None if it has none of them."""
        return next((each for each in self.ours if each in call.options), None)

    def __call__(self, call: StageCall, name: str, value: Any) -> str:
        option = self.of(call)
        if option is None:
            return f"leave it out; {call.method} has no {' or '.join(self.ours)}"
        if value is None or (self.zero and value == 0):
            return "leave it out; that is the default"
        return f"write {option}={_shown(value)}"


def _renamed(*ours: str, zero: bool = False) -> _Renamed:
    return _Renamed(ours, zero)


def _sampling(ours: str = "") -> _Write:
    """Advise an entry of `sampling_params`, by its name in OpenAI's chat API."""

    def write(call: StageCall, name: str, value: Any) -> str:
        if "sampling_params" not in call.options:
            return f"leave it out; {call.method} samples nothing"
        return f'write sampling_params={{"{ours or name}": {_shown(value)}}}'

    return write


def _workers(call: StageCall, name: str, value: Any) -> str:
    """Advise `concurrency` for Ray Data's `ActorPoolStrategy` and `TaskPoolStrategy`."""
    if "concurrency" not in call.options:
        return _leave_out(f"{call.method} runs in the workers that read and write")(
            call, name, value
        )
    least, most = (getattr(value, f"{end}_size", None) for end in ("min", "max"))
    size = getattr(value, "size", None)
    if isinstance(size, int) or (least == most and isinstance(most, int)):
        return f"write concurrency={size if isinstance(size, int) else most}"
    if isinstance(least, int) and isinstance(most, int):
        return f"write concurrency=({least}, {most})"
    if isinstance(least, int) and isinstance(most, float) and math.isinf(most):
        return f"write concurrency=({least}, N), N being the largest number of workers"
    return "leave it out; a class stays loaded in its workers, and concurrency sets their number"


def _row_count(call: StageCall, name: str, value: Any) -> str:
    if not value:
        return 'leave it out; cardinality="one_to_one" is the default'
    return (
        'write cardinality="filter" if rows may be dropped, or cardinality="one_to_many", '
        'id="<column of the new id>" if rows are added'
    )


def _fan_out(call: StageCall, name: str, value: Any) -> str:
    if not value:
        return 'leave it out; cardinality="one_to_one" is the default'
    return 'write cardinality="one_to_many", id="<column of the new id>"'


def _cached(call: StageCall, name: str, value: Any) -> str:
    if "reuse" not in call.options or value is None or value:
        return "leave it out; results are reused as long as they are those of a new computation"
    return 'write reuse="none"'


def _batched(call: StageCall, name: str, value: Any) -> str:
    """Advise the method for batches."""
    if not value or "batch_format" in call.options:
        return f"leave it out; {call.method} does so by default"
    return 'call map_batches(name, fn, schema=..., batch_format="numpy") instead'


def _options_of_ray(call: StageCall, name: str, value: Any) -> str:
    """Advise each entry of a mapping of options of Ray actors."""
    if not isinstance(value, Mapping) or not value:
        return "leave it out; what a worker reserves are the stage's own arguments"
    lines = []
    for option, given in value.items():
        if option in call.options:
            lines.append(f"{option}: write {option}={_shown(given)}")
        else:
            lines.append(f"{option}: {_advice(call, str(option), given) or 'leave it out'}")
    return ", ".join(lines)


def _returned(call: StageCall, name: str, value: Any) -> str:
    """Advise a schema for the type that a function returns."""
    if "return_format" in call.options:
        return "write return_format=<a pydantic model>; without it the answer is text"
    if "return_type" in call.options:
        return "write return_type=<Spark's type>"
    if "schema" not in call.options:
        return f"leave it out; {call.method} knows its types"
    kind = _arrow_type(value)
    if kind is not None and pa.types.is_struct(kind):
        named = {field.name: sql_name(field.type) or "<SQL type>" for field in kind}
    else:
        named = {"<column>": sql_name(kind) or "<SQL type>" if kind else "<SQL type>"}
    columns = ", ".join(f'"{column}": "{written}"' for column, written in named.items())
    return f"write schema={{{columns}}}"


def _arrow_type(value: Any) -> pa.DataType | None:
    """Return the Arrow type of a Python, Arrow, Daft or Spark type; None if it is not known."""
    readers = [lambda: spark.parse_return_type(value, ""), lambda: arrow_type(value)]
    for read in readers if isinstance(value, str) else reversed(readers):
        with contextlib.suppress(SchemaError):
            return read()
    return None


_RAY, _DAFT, _SPARK, _VANE = "Ray Data", "Daft", "Spark", "Vane"
_HUGGING_FACE = "Hugging Face Datasets"
_gpus = _renamed("gpus", "gpus_per_actor", zero=True)
_placed = _leave_out(
    "workers are placed where there is room, and resources={...} or accelerator_type select nodes"
)
_replaced = _leave_out("a worker that dies is replaced, and its rows are computed again")
_sized = _leave_out(
    "batch_size sets the rows of a call, and the pipeline's fragment_rows those of a task"
)
_ordered = _leave_out("workers get rows in an order that shares prefixes")

_FOREIGN: Mapping[str, _Foreign] = {
    "num_gpus": _Foreign(_RAY, _gpus),
    "compute": _Foreign(_RAY, _workers),
    "zero_copy_batch": _Foreign(
        _RAY, _leave_out("each call gets a copy of its batch, which it may change")
    ),
    "udf_modifying_row_count": _Foreign(_RAY, _row_count),
    "ray_remote_args": _Foreign(_RAY, _options_of_ray),
    "ray_remote_args_fn": _Foreign(
        _RAY, _leave_out("all workers of a stage reserve the same, by the stage's own arguments")
    ),
    "scheduling_strategy": _Foreign(_RAY, _placed),
    "label_selector": _Foreign(_RAY, _placed),
    "fallback_strategy": _Foreign(_RAY, _placed),
    "max_calls": _Foreign(_RAY, _renamed("max_batches_per_actor")),
    "max_restarts": _Foreign(_RAY, _replaced),
    "max_task_retries": _Foreign(_RAY, _renamed("max_retries")),
    "retry_exceptions": _Foreign(_RAY, _renamed("retry_on")),
    "runtime_env": _Foreign(
        _RAY,
        _leave_out(
            'env_vars=["<NAME>"] sends variables to the workers, and packages are installed where '
            "the cluster runs"
        ),
    ),
    "object_store_memory": _Foreign(
        _RAY, _leave_out("LocalCluster(object_store_memory=...) sets it for the whole node")
    ),
    "num_cpus": _Foreign(_RAY, _renamed("num_cpus", "cpus", zero=True)),
    "memory": _Foreign(_RAY, _renamed("memory", zero=True)),
    "concurrency": _Foreign(_RAY, _renamed("concurrency")),
    "num_workers": _Foreign(_VANE, _renamed("concurrency")),
    "return_dtype": _Foreign(_DAFT, _returned),
    "use_process": _Foreign(_DAFT, _leave_out("each worker is a process of its own")),
    "unnest": _Foreign(
        _DAFT, _leave_out("each column that schema names is a column of the stage already")
    ),
    "ray_options": _Foreign(_DAFT, _options_of_ray),
    "init_args": _Foreign(_DAFT, _renamed("fn_constructor_args")),
    "cpus": _Foreign("Daft and Vane", _renamed("num_cpus", zero=True)),
    "memory_bytes": _Foreign("Daft and Vane", _renamed("memory", zero=True)),
    "gpus": _Foreign("Daft and Vane", _gpus),
    "max_concurrency": _Foreign(_DAFT, _renamed("max_concurrency", "concurrency")),
    "return_type": _Foreign(_SPARK, _returned),
    "returnType": _Foreign(_SPARK, _returned),
    "input_tensor_shapes": _Foreign(
        _SPARK, _leave_out("predict_batch(name, make_predict_fn, inputs=[...]) takes it")
    ),
    "batch_format": _Foreign(
        _RAY, _leave_out("this stage does not pass batches; map_batches takes it")
    ),
    "actor_number": _Foreign(_VANE, _renamed("concurrency")),
    "num_actors": _Foreign(_VANE, _renamed("concurrency")),
    "ray_address": _Foreign("dagster-ray", _renamed("address")),
    "default_parallelism": _Foreign(_VANE, _renamed("concurrency")),
    "gpus_per_actor": _Foreign(_VANE, _gpus),
    "max_concurrency_per_actor": _Foreign(_VANE, _renamed("max_concurrency")),
    "request_batch_size": _Foreign(_VANE, _renamed("batch_size")),
    "engine_init_timeout_s": _Foreign(_VANE, _renamed("startup_timeout_s")),
    "system_message": _Foreign(_VANE, _renamed("system")),
    "expr": _Foreign(
        _RAY, _leave_out("project(name, [...], where=...) filters by SQL, filter by a function")
    ),
    "fn_args": _Foreign(_RAY, _renamed("fn_constructor_args")),
    "fn_kwargs": _Foreign(_RAY, _renamed("fn_constructor_kwargs")),
    "batched": _Foreign(_HUGGING_FACE, _batched),
    "load_from_cache_file": _Foreign(_HUGGING_FACE, _cached),
    "num_proc": _Foreign(_HUGGING_FACE, _renamed("concurrency")),
    "remove_columns": _Foreign(
        _HUGGING_FACE,
        _leave_out(
            "a stage has the columns of its schema and those that include_columns names; "
            "project(name, ...) selects others"
        ),
    ),
    "flat_map": _Foreign(_VANE, _fan_out),
    "side_effects": _Foreign(_VANE, _leave_out("a call runs once for each batch that succeeds")),
    "target_max_batch_bytes": _Foreign(_VANE, _sized),
    "task_input_max_bytes": _Foreign(_VANE, _sized),
    "output_target_max_bytes": _Foreign(_VANE, _sized),
    "output_batch_size": _Foreign(_VANE, _sized),
    "min_task_batch_size": _Foreign(_VANE, _sized),
    "preserve_compute_batch_boundaries": _Foreign(_VANE, _sized),
    "streaming_breaker": _Foreign(_VANE, _leave_out("stages run at the same time")),
    "ray_actor_thread_policy": _Foreign(
        _VANE, _leave_out("num_cpus sets the threads of a worker's libraries")
    ),
    "inflight_limit": _Foreign(
        _VANE, _leave_out("batch_size * max_concurrency rows are in flight in one worker")
    ),
    "max_buffer_size": _Foreign(
        _VANE, _leave_out("batch_size * max_concurrency rows are in flight in one worker")
    ),
    "do_prefix_routing": _Foreign(_VANE, _ordered),
    "min_bucket_size": _Foreign(_VANE, _ordered),
    "prefix_match_threshold": _Foreign(_VANE, _ordered),
    "load_balance_threshold": _Foreign(_VANE, _ordered),
    "temperature": _Foreign(_VANE, _sampling()),
    "top_p": _Foreign(_VANE, _sampling()),
    "top_k": _Foreign(_VANE, _sampling()),
    "max_output_tokens": _Foreign(_VANE, _sampling("max_tokens")),
    "max_new_tokens": _Foreign(_VANE, _sampling("max_tokens")),
    "stop_sequences": _Foreign(_VANE, _sampling("stop")),
    "generate_args": _Foreign(_VANE, _renamed("sampling_params")),
    "engine_args": _Foreign(
        _VANE, _leave_out('provider_options={"engine_kwargs": {...}} takes them')
    ),
}
"""Arguments of other systems. They apply only to methods without an argument of the same name.

Ray 2.60 `ray.data.Dataset.map_batches`, `filter` and the options of actors; Daft 0.7 `daft.func`,
`daft.cls` and `daft.udf`; PySpark 4 `predict_batch_udf`; `map_batches`, `prompt` and `embed` of
relations of Vane.
"""

_FOREIGN_VALUES: Mapping[tuple[str, str], tuple[str, str]] = {
    ("on_error", "log"): (_DAFT, 'on_error="null", which keeps the row and its error'),
    ("on_error", "ignore"): (
        "Daft and Vane",
        'on_error="null", which keeps the row and its error, or on_error="quarantine"',
    ),
    ("batch_format", "default"): (_RAY, 'batch_format="numpy"'),
}
