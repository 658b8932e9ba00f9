"""The names of vLLM's arguments, known without an import of vLLM, which takes seconds."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from vane_dagster._keywords import similar
from vane_dagster._worker_process import is_worker

OPERATIONAL_ARGUMENTS = (
    "block_size",
    "cpu_offload_gb",
    "device",
    "disable_log_stats",
    "distributed_executor_backend",
    "download_dir",
    "enable_chunked_prefill",
    "enable_log_requests",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "logging_config",
    "max_loras",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_parallel_loading_workers",
    "pipeline_parallel_size",
    "swap_space",
    "tensor_parallel_size",
)
"""Arguments of vLLM's engine that do not change answers."""
_DECLARED = re.compile(r"""^    ([a-z][a-z0-9_]*): |["']--([a-z][a-z0-9-]*)["']""", re.MULTILINE)
"""A field of a dataclass, or a flag of a parser."""
_MISSPELLED = 0.88
"""Similarity to a known name above which an unknown name is a misspelling of it."""
KNOWN = frozenset(
    """
    additional_config aggregate_engine_logging all2all_backend allow_credentials
    allow_deprecated_quantization allowed_headers allowed_local_media_path allowed_media_domains
    allowed_methods allowed_origins anthropic_disabled_thinking_effort api_key api_server_count
    async_scheduling attention_backend attention_config aux_output_config block_size
    chat_template chat_template_content_format code_revision cohere_format
    cohere_is_reasoning_model collect_detailed_traces compilation_config config config_format
    convert cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb
    cpu_offload_params cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets
    data_parallel_address data_parallel_backend data_parallel_external_lb
    data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank
    data_parallel_rpc_port data_parallel_size data_parallel_size_local data_parallel_start_rank
    data_parallel_supervisor_port dbo_decode_token_threshold dbo_prefill_token_threshold
    dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate decode_context_parallel_size
    default_chat_template_kwargs default_mm_loras device_ids device_memory_utilization
    diffusion_config disable_access_log_for_endpoints disable_cascade_attn
    disable_chunked_mm_input disable_custom_all_reduce disable_fastapi_docs
    disable_hybrid_kv_cache_manager disable_log_stats disable_nccl_for_dp_synchronization
    disable_sliding_window disable_uvicorn_access_log distributed_executor_backend
    distributed_timeout_seconds download_dir dp_supervisor_probe_failure_threshold
    dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_sync_interval dtype
    ec_manager_config ec_transfer_config elastic_ep_max_dp_size enable_auto_tool_choice
    enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator enable_dbo
    enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel
    enable_fault_tolerance enable_flash_late_interaction enable_flashinfer_autotune
    enable_force_include_usage enable_hc_sp enable_layerwise_nvtx_tracing enable_log_deltas
    enable_log_outputs enable_log_requests enable_logging_iteration_details enable_lora
    enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint
    enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats
    enable_moe_shared_loras enable_nccl_comm_suspend enable_offline_docs
    enable_per_request_metrics enable_prefix_caching enable_prompt_embeds
    enable_prompt_tokens_details enable_request_id_headers enable_return_routed_experts
    enable_scale_out enable_server_load_tracking enable_shm_tensor_arena enable_sleep_mode
    enable_ssl_refresh enable_tokenizer_info_endpoint enable_tower_connector_lora
    enable_trace_replay enforce_eager engram_config eplb_config
    exclude_tools_when_tool_choice_none expert_placement_strategy fail_on_environ_validation
    fault_tolerance_config fingerprint_mode fingerprint_value fully_sharded_loras
    gdn_prefill_backend generation_config gpu_memory_utilization grpc grpc_port
    h11_max_header_count h11_max_incomplete_event_size headless hf_config_path hf_overrides
    hf_token host ignore_patterns interleave_mm_strings io_processor_plugin ir_op_priority
    jit_monitor_mode jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config
    kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_memory_bytes kv_cache_metrics
    kv_cache_metrics_sample kv_events_config kv_offloading_backend kv_offloading_size
    kv_sharing_fast_prefill kv_transfer_config language_model_only limit_mm_per_prompt
    linear_backend load_format log_config_file log_error_stack log_level logging_config
    logits_processors logprobs_mode long_prefill_token_threshold
    long_prefill_token_threshold_adaptive lora_dtype lora_modules lora_target_modules
    mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds
    mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm master_addr master_port max_cpu_loras
    max_cudagraph_capture_size max_log_len max_logprobs max_lora_cls_labels max_lora_rank
    max_loras max_model_len max_num_active_seqs max_num_batched_tokens max_num_queued_reqs
    max_num_queued_tokens max_num_scheduled_tokens max_num_seqs max_parallel_loading_workers
    media_io_kwargs middleware mm_device_do_normalize mm_encoder_attn_backend
    mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
    mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm
    mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
    mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model
    model_class_overrides model_impl model_loader_extra_config model_weights moe_backend nnodes
    node_rank num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes offload_backend
    offload_group_size offload_num_in_group offload_params offload_prefetch_step
    optimization_level otlp_traces_endpoint override_generation_config
    per_request_spec_decode_metrics performance_mode pipeline_parallel_size pooler_config port
    prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo prefix_match_unit profiler_config pt_load_map_location quantization
    quantization_config ray_workers_use_nsight reasoning_config reasoning_parser
    reasoning_parser_plugin renderer_num_workers replayssm_buffer_len response_role
    return_sampling_mask return_tokens_as_token_ids revision root_path runner
    safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    scheduler_cls scheduler_reserve_full_isl scheduling_policy seed served_model_name
    show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling skip_tokenizer_init
    sleep_mode_offload_cudagraph sleep_preserve_parameter_names sparse_indexer_topk_backend
    spec_method spec_model spec_tokens specialize_active_lora speculative_config
    sse_keep_alive_interval ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile
    stream_interval structured_outputs_config swa_bounded_replay tensor_parallel_size tokenizer
    tokenizer_mode tokenizer_revision tokens_only tool_call_parser tool_parser_plugin
    tool_server tool_strict_level trust_remote_code trust_request_chat_template
    trust_request_mm_kwargs ubatch_size uds use_fp64_gumbel use_replayssm use_tqdm_on_load
    uvicorn_log_level video_pruning_method video_pruning_rate watermark watermark_config
    weight_transfer_config worker_cls worker_extension_cls
    """.split()  # noqa: SIM905 (a list would have a line for each)
)
"""The arguments of the engine and the flags of the server, of vLLM 0.32."""


def misspelled(name: str, own: Collection[str] = (), is_elsewhere: bool = False) -> str | None:
    """Describe a name that is neither an argument of vLLM's engine nor a flag of its server.

    The vLLM that is installed here decides. Without it, only a name that is nearly a known one is
    refused, because other versions of vLLM have other arguments.
    """
    installed = None if is_elsewhere else _installed()
    if name in (installed or KNOWN) or is_worker():  # which may have another vLLM than the driver
        return None
    if installed is not None:
        hint = similar(name, [*installed, *own])
        return f"The vLLM that is installed here does not have it. {hint}".rstrip()
    meant = difflib.get_close_matches(name, [*KNOWN, *own], 1, _MISSPELLED)
    return f"Did you mean {meant[0]!r}?" if meant else None


@functools.lru_cache(maxsize=1)
def _installed() -> frozenset[str] | None:
    """Return the names in the source of the installed vLLM; None without one, or if it moved them.

    Arguments that plugins of vLLM add are not in it.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    files = [folder / "engine" / "arg_utils.py", *folder.glob("entrypoints/**/cli_args.py")]
    texts = [file.read_text() for file in files if file.is_file()]
    found = frozenset(
        (field or flag.replace("-", "_"))
        for text in texts
        for field, flag in _DECLARED.findall(text)
    )
    return found if "max_model_len" in found else None
