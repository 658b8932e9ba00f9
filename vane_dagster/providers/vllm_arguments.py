"""Names of vLLM's arguments."""

from __future__ import annotations

OPERATIONAL_ARGUMENTS = (
    "block_size",
    "cpu_offload_gb",
    "disable_log_stats",
    "distributed_executor_backend",
    "download_dir",
    "enable_chunked_prefill",
    "enable_log_requests",
    "enable_lora",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "logging_config",
    "max_cpu_loras",
    "max_lora_rank",
    "max_loras",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_parallel_loading_workers",
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "pipeline_parallel_size",
    "tensor_parallel_size",
)
"""Arguments of vLLM's engine that do not change answers."""
