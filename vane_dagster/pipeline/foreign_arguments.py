"""Arguments that a call does not take: those of other systems, and misspelt ones.

Nothing here is an alias. Each message has the line to write instead, with the value that was given
where it is a number, so that a call written for Ray Data, Daft, Spark or Vane is corrected in one
step.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vane_dagster._keywords import similar
from vane_dagster.errors import DefinitionError, names
from vane_dagster.pipeline.records import RECORDS

_WRITTEN = re.compile(r"write (\w+)=")
_MISSPELT = 0.85
"""The similarity from which a name is taken for one of another system."""


@dataclass(frozen=True)
class StageCall:
    """The call of a method that adds a stage, or another call with options.

    Attributes:
        method: The method's name.
        options: Its own options.
        taken: The names of all of its parameters, if it has others.
        nested: Options of what the call takes, by how they are written: with ``{}`` in their place.
        adds_stage: Whether it adds a stage. Advice about stages is only for those that do.
        elsewhere: Options of related calls, and these calls.
        more: What takes further options, for messages.
    """

    method: str
    options: tuple[str, ...]
    taken: tuple[str, ...] = ()
    nested: Mapping[str, Collection[str]] = field(default_factory=dict)
    adds_stage: bool = True
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    more: str = ""

    def written(self, option: str, value: Any) -> str | None:
        """Return how an option is written in the call; None if nothing of it takes the option."""
        if option in self.options:
            return f"{option}={_shown(value)}"
        for form, inner in self.nested.items():
            if option in inner:
                return form.format(f"{option}={_shown(value)}")
        return None


def stage_call(
    method: Callable[..., Any], nested: Mapping[str, Collection[str]] | None = None
) -> StageCall:
    """Describe the call of a method by its parameters.

    Args:
        method: The method.
        nested: See `StageCall`; in addition to the fields of the records that it takes.
    """
    parameters = inspect.signature(method).parameters.values()
    own = tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
    declared = {each.name for each in parameters}
    records = {
        f"{argument}={record}({{}})": fields
        for argument, (record, fields) in RECORDS.items()
        if argument in declared
    }
    return StageCall(method.__name__, own, tuple(sorted(declared)), {**(nested or {}), **records})


def unknown_arguments(call: StageCall, unknown: Mapping[str, Any]) -> str:
    """Describe unknown arguments, each with the line to write or the names that are similar.

    Args:
        call: The call.
        unknown: The arguments and their values.
    """
    return "\n".join(
        f"unknown argument {name!r} of {call.method}{_correction(call, name, value)}"
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
    return f". {name!r} is known from {written}" if written else ""


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


def _correction(call: StageCall, name: str, value: Any) -> str:
    if name in call.elsewhere:
        return f": write {name}={_shown(value)} at {call.elsewhere[name]}"
    if written := call.written(name, value):
        return f": write {written}"
    if advice := _advice(call, name, value):
        return f", known from {advice}"
    inner = (option for options in call.nested.values() for option in options)
    known = list(dict.fromkeys((*call.options, *call.taken, *inner)))
    nearest = difflib.get_close_matches(name.lower(), [*known, *_FOREIGN], 1, _MISSPELT)
    if nearest and nearest[0] not in known and (advice := _advice(call, nearest[0], value)):
        return f". Did you mean {nearest[0]!r} of {advice}"
    if found := similar(name, known):
        return f". {found}"
    own = f"its options are {names(call.options, 50)}" if call.options else "it has no options"
    provider = "; those of its provider go into model=vd.Model(..., options={...})"
    return f": {own}{provider if 'model' in call.options and call.adds_stage else ''}{call.more}"


def _advice(call: StageCall, name: str, value: Any) -> str | None:
    """Return the system of an argument and what to write in its place; None if it is not known."""
    if name not in _FOREIGN:
        return None
    system, ours = _FOREIGN[name]
    for each in ours.split(" | "):
        written = call.written(each, value) if each.isidentifier() else None
        if written is None and not call.adds_stage:
            continue
        named = _WRITTEN.match(each)
        if each.isidentifier() and written is None:
            continue
        if named and named[1] not in (*call.options, *call.taken):
            continue
        if not value and not isinstance(value, str) and not each.startswith("leave"):
            return f"{system}: leave it out; that is the default"
        text = f"write {written}" if written else each.replace("{}", _shown(value))
        return f"{system}: {text}"
    if not call.adds_stage:
        return None
    return f"{system}: leave it out; {call.method} has no such argument"


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)) and value and all(type(each) is int for each in value):
        return repr(value)
    if isinstance(value, bool) or value is None:
        return repr(value)
    return f"{value:.15g}" if isinstance(value, (int, float)) else "..."


_RAY, _DAFT, _SPARK, _VANE = "Ray Data", "Daft", "Spark", "Vane"
_HUGGING_FACE, _BEFORE = "Hugging Face Datasets", "a release before"
_PLACED = (
    "leave it out; workers are placed where there is room, and vd.Workers(resources=...) or "
    "vd.Workers(accelerator_type=...) select nodes"
)
_REPLACED = "leave it out; a worker that dies is replaced, and its rows are computed again"
_SIZED = (
    "leave it out; batch_size sets the rows of a call, and the pipeline's fragment_rows those of a "
    "task"
)
_ORDERED = "leave it out; workers get rows in an order that shares prefixes"
_IN_FLIGHT = (
    "leave it out; batch_size times vd.Workers(max_concurrency=...) rows are in flight in one "
    "worker"
)
_CHILDREN = (
    'write cardinality="filter" if rows may be dropped, or '
    'cardinality=vd.Children("<column of the new id>") if rows are added'
)
_FIELDS = "write what a worker reserves as gpus=... and concurrency=vd.Workers(...)"
_TYPE = (
    "return_type | write return_format=<a pydantic model>; without it the answer is text | write "
    'schema={"<column>": "<SQL type>"}'
)

_FOREIGN: Mapping[str, tuple[str, str]] = {
    "num_gpus": (_RAY, "gpus"),
    "compute": (
        _RAY, "write concurrency=N, or concurrency=(min, max); a class stays loaded in its workers"
    ),
    "zero_copy_batch": (
        _RAY, "leave it out; each call gets a copy of its batch, which it may change"
    ),
    "udf_modifying_row_count": (_RAY, _CHILDREN),
    "ray_remote_args": (_RAY, _FIELDS),
    "ray_remote_args_fn": (_RAY, _FIELDS),
    "scheduling_strategy": (_RAY, _PLACED),
    "label_selector": (_RAY, _PLACED),
    "fallback_strategy": (_RAY, _PLACED),
    "max_calls": (_RAY, "max_batches"),
    "max_restarts": (_RAY, _REPLACED),
    "max_task_retries": (_RAY, "max_retries"),
    "retry_exceptions": (_RAY, "retry_on"),
    "runtime_env": (
        _RAY,
        'leave it out; vd.Workers(env_vars=["<NAME>"]) sends variables to the workers, and '
        "packages are installed where the cluster runs",
    ),
    "object_store_memory": (
        _RAY, "leave it out; LocalCluster(object_store_memory=...) sets it for the whole node"
    ),
    "fn_args": (
        _RAY,
        'write fn_kwargs={"<parameter>": ...}, which passes the arguments by name | '
        "fn_constructor_args",
    ),
    "num_workers": (_VANE, "concurrency"),
    "return_dtype": (_DAFT, _TYPE),
    "use_process": (_DAFT, "leave it out; each worker is a process of its own"),
    "unnest": (
        _DAFT, "leave it out; each column that schema names is a column of the stage already"
    ),
    "ray_options": (_DAFT, _FIELDS),
    "init_args": (_DAFT, "fn_constructor_args"),
    "cpus": ("Daft and Vane", "num_cpus"),
    "num_cpus": (_RAY, "num_cpus | cpus"),
    "concurrency": (_RAY, "concurrency | max_concurrency"),
    "memory_bytes": ("Daft and Vane", "memory"),
    "return_type": (_SPARK, _TYPE),
    "returnType": (_SPARK, _TYPE),
    "input_tensor_shapes": (
        _SPARK, "leave it out; predict_batch(name, make_predict_fn, columns=[...]) takes it"
    ),
    "batch_format": (
        _RAY, "leave it out; this stage does not pass batches; map_batches takes it"
    ),
    "actor_number": (_VANE, "concurrency"),
    "num_actors": (_VANE, "concurrency"),
    "ray_address": ("dagster-ray", "address"),
    "default_parallelism": (_VANE, "concurrency"),
    "gpus_per_actor": (_VANE, "gpus"),
    "max_concurrency_per_actor": (_VANE, "max_concurrency"),
    "request_batch_size": (_VANE, "batch_size"),
    "engine_init_timeout_s": (_VANE, "startup_timeout_s"),
    "system_message": (_VANE, "system"),
    "expr": (
        _RAY, "leave it out; project(name, [...], where=...) filters by SQL, filter by a function"
    ),
    "batched": (
        _HUGGING_FACE, 'call map_batches(name, fn, schema=..., batch_format="numpy") instead'
    ),
    "load_from_cache_file": (
        _HUGGING_FACE, 'leave it out, or write reuse="none" to compute all rows again'
    ),
    "num_proc": (_HUGGING_FACE, "concurrency"),
    "remove_columns": (
        _HUGGING_FACE,
        "leave it out; a stage has the columns of its schema and those that include_columns names; "
        "project(name, ...) selects others",
    ),
    "preprocess": (_RAY, "write messages=..., the function itself"),
    "postprocess": (
        _RAY,
        'add a stage: .map("<name>", postprocess, schema=...); an edit of it then costs no prompt',
    ),
    "flat_map": (_VANE, _CHILDREN),
    "side_effects": (_VANE, "leave it out; a call runs once for each batch that succeeds"),
    "target_max_batch_bytes": (_VANE, _SIZED),
    "task_input_max_bytes": (_VANE, _SIZED),
    "output_target_max_bytes": (_VANE, _SIZED),
    "output_batch_size": (_VANE, _SIZED),
    "min_task_batch_size": (_VANE, _SIZED),
    "preserve_compute_batch_boundaries": (_VANE, _SIZED),
    "streaming_breaker": (_VANE, "leave it out; stages run at the same time"),
    "ray_actor_thread_policy": (
        _VANE, "leave it out; vd.Workers(num_cpus=...) sets the threads of a worker's libraries"
    ),
    "inflight_limit": (_VANE, _IN_FLIGHT),
    "max_buffer_size": (_VANE, _IN_FLIGHT),
    "do_prefix_routing": (_VANE, _ORDERED),
    "min_bucket_size": (_VANE, _ORDERED),
    "prefix_match_threshold": (_VANE, _ORDERED),
    "load_balance_threshold": (_VANE, _ORDERED),
    "temperature": (_VANE, 'write sampling_params={"temperature": {}}'),
    "top_p": (_VANE, 'write sampling_params={"top_p": {}}'),
    "top_k": (_VANE, 'write sampling_params={"top_k": {}}'),
    "max_tokens": (
        "OpenAI",
        'write sampling_params={"max_tokens": {}}; the budget of a run is '
        "model=vd.Model(..., token_budget=...)",
    ),
    "max_output_tokens": (_VANE, 'write sampling_params={"max_tokens": {}}'),
    "max_new_tokens": (_VANE, 'write sampling_params={"max_tokens": {}}'),
    "stop_sequences": (_VANE, 'write sampling_params={"stop": {}}'),
    "generate_args": (_VANE, "sampling_params"),
    "engine_args": (_VANE, 'write model=vd.Model(..., options={"engine_kwargs": {}})'),
    "provider_options": (_DAFT, "options"),
    "inputs": (_BEFORE, 'write columns={"<parameter>": "<column>"}'),
    "server": (_BEFORE, "write model=<the server>"),
    "servers": (
        _BEFORE,
        'write fn_kwargs={"<parameter>": <the server>}, or fn_constructor_kwargs for a class | '
        'write fn_constructor_kwargs={"<parameter>": <the server>}',
    ),
    "reuse_partitions": (_BEFORE, "partitions"),
    "max_batches_per_actor": (_BEFORE, "max_batches"),
    "max_cost": (_BEFORE, "cost_budget"),
    "index": (_BEFORE, 'write options={"index": ...}'),
    "catalog": (_BEFORE, 'write options={"catalog": ...}'),
    "table": (_BEFORE, 'write options={"table": ...}'),
}  # fmt: skip
"""Arguments of other systems: the system, and the name of ours, or what to write or to do.

Of several, separated by a bar, the first one applies whose argument the call takes.

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
