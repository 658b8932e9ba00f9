"""What to write in place of arguments of other systems. Nothing here is an alias.

It imports little, because a user's module that only decorates functions does too.
"""

from __future__ import annotations

from collections.abc import Mapping

_NAMES: Mapping[str, str] = {
    "gpus": "num_gpus gpus_per_actor",
    "num_cpus": "cpus",
    "cpus": "num_cpus",
    "memory": "memory_bytes",
    "concurrency": "num_workers actor_number num_actors default_parallelism num_proc compute",
    "max_concurrency": "concurrency max_concurrency_per_actor",
    "max_batches": "max_calls",
    "max_retries": "max_task_retries",
    "retry_on": "retry_exceptions",
    "startup_timeout_s": "engine_init_timeout_s",
    "batch_size": "request_batch_size",
    "fn_kwargs": "fn_args",
    "fn_constructor_args": "init_args fn_args",
    "return_type": "returnType return_dtype",
    "return_format": "return_type returnType return_dtype",
    "schema": "return_type returnType return_dtype",
    "cardinality": "udf_modifying_row_count flat_map",
    "system": "system_message",
    "messages": "preprocess",
    "sampling_params": "generate_args temperature top_p top_k max_tokens max_output_tokens"
    " max_new_tokens stop_sequences",
    "options": "provider_options engine_args",
    "reuse": "load_from_cache_file",
    "address": "ray_address",
}
"""Arguments of ours, and what they are called elsewhere.

Ray 2.60 `ray.data.Dataset.map_batches`, `filter` and the options of actors; Daft 0.7 `daft.func`,
`daft.cls` and `daft.udf`; PySpark 4 `predict_batch_udf`; Hugging Face's `Dataset.map`;
`map_batches`, `prompt` and `embed` of relations of Vane.
"""

_FORMS: Mapping[str, str] = {
    "concurrency": "concurrency=N, or concurrency=(min, max)",
    "schema": 'schema={"<column>": "<SQL type>"}, or schema="infer"',
    "cardinality": 'cardinality="filter" if rows may be dropped, or '
    'cardinality=vd.Children("<column of the new id>") if rows are added',
    "sampling_params": 'sampling_params={"temperature": ..., "max_tokens": ...}',
    "reuse": 'reuse="none" to compute all rows again',
}
"""How to write arguments whose value is not that of the other system."""

_ABSENT: Mapping[str, str] = {
    "workers are placed where there is room, and vd.Workers(resources=..., accelerator_type=...) "
    "select nodes": "scheduling_strategy label_selector fallback_strategy",
    "write what a worker reserves as gpus=... and concurrency=vd.Workers(...)": (
        "ray_remote_args ray_remote_args_fn ray_options"
    ),
    'vd.Workers(env_vars=["<NAME>"]) sends variables to the workers, and packages are installed '
    "where the cluster runs": "runtime_env",
    "project(name, [...], where=...) filters by SQL, filter by a function": "expr",
    'map_batches(name, fn, schema=..., batch_format="numpy") calls fn with batches': (
        "batched batch_format"
    ),
    "predict_batch(name, make_predict_fn, columns=[...]) takes it": "input_tensor_shapes",
    'add a stage: .map("<name>", postprocess)': "postprocess",
    "functools.partial(fn, ...) has its arguments": "fn_constructor_args fn_constructor_kwargs",
    "each worker is a process of its own": "use_process",
    "each column that schema names is a column of the stage": "unnest",
}
"""Arguments that no stage needs, by what holds instead."""


def advice(written: Mapping[str, str]) -> dict[str, str]:
    """Return what to write in place of each argument of another system."""
    found: dict[str, str] = {}
    for ours, others in _NAMES.items():
        if ours in written:
            text = f"write {_FORMS.get(ours, written[ours])}"
            found = dict.fromkeys(others.split(), text) | found
    for text, others in _ABSENT.items():
        found = dict.fromkeys(others.split(), f"leave it out; {text}") | found
    return {name: text for name, text in found.items() if name not in written}
