"""The table of vLLM's flags in kvern, by name with underscores.

A name that kvern has too is here only if vLLM's values differ.
"""

from __future__ import annotations

from kvern.options.rules import (
    Backend,
    HostMemory,
    Idle,
    Named,
    Partly,
    Refused,
    Rule,
    Speculation,
    Switch,
    adapter,
    human_number,
    length,
    one_of,
)
from kvern.options.texts import MANY

ONE = ("1",)
ONE_DEVICE = "an engine is one device, or the ranks of --tensor-parallel-size and --pipeline-parallel-size"
SEVERAL_MACHINES = "engines and ranks on several machines are --executor ray, on a Ray cluster"
EXPERTS = "copies of experts are --redundant-experts N, and --rebalance-experts SECONDS moves them by their load"
ONE_PROCESS = "a server is one process, and its engine another"
NO_CODE = "models are computed by code of kvern alone, never by code from their folders; see kvern models --families"
NO_COMPILER = "nothing is compiled by torch.compile, and CUDA graphs are captured for all sizes; see --no-cuda-graphs"
MEDIA = "images are read as the model's folder says, and no audio or video"
ALWAYS = "it is always so"
LOGS = "kvern's log holds warnings and errors; --log-requests adds a line for each request"
NO_DRAFT = "speculative decoding is --draft-model MODEL, or --proposer ngram; as many drafts are verified as pay"
NO_TRANSFER = "the KV cache is kept in stores, and other packages may add some: --kv-tier host:32GB disk:/path:500GB"
NO_PLUGIN = "kvern takes plugins from installed packages, by their entry points"
SPLIT = "prompts are split over steps within --max-batch-tokens, beside decodes within --target-itl"
POOLING = "/v1/embeddings answers for models that are trained for it; /v1/rerank and /v1/score go by the model's folder"
NO_FORMAT = "weights are safetensors files in Hugging Face format"

TOOL_PARSERS = {
    "qwen3_xml": "qwen3_coder",
    "glm45": "glm",
    "glm47": "glm",
    "llama3_json": "llama",
    "llama4_json": "llama",
    "llama4_pythonic": "pythonic",
    "minimax_m2": "minimax",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "openai": "harmony",
    "seed_oss": "seed",
    "hy_v3": "hy3",
    "hunyuan_a13b": "tool_calls",
    "phi4_mini_json": "functools",
    **dict.fromkeys(("xlam", "internlm", "apertus", "gigachat3", "granite-20b-fc", "cohere_command3"), "json"),
}
REASONING_PARSERS = {
    "qwen3": "think",
    "deepseek_r1": "think",
    "glm45": "think",
    "seed_oss": "seed",
    "minimax_m2": "think",
    "deepseek_v3": "think",
    "kimi_k2": "think",
    "openai_gptoss": "harmony",
    "cohere_command": "cohere",
    "ernie45": "think",
    "granite": "think",
    "hunyuan_a13b": "think",
    "muse_glimmer": "muse",
    "nemotron_v3": "think",
    "olmo3": "think",
    "step3": "think",
    "step3p5": "think",
}
BACKENDS = {"triton_attn": "triton"}
LOAD_FORMATS = {"safetensors": "auto", "hf": "auto"}
STORED_FORMATS = (
    "awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "gguf", "gptq", "gptq_marlin",
    "modelopt", "modelopt_fp4", "mxfp4", "torchao",
)  # fmt: skip
GRAMMARS = ("auto", "guidance", "llguidance")

grammar_backend = Idle("llguidance follows all grammars: give auto, or leave the flag out", 1, only=GRAMMARS)

VLLM: dict[str, Rule] = {
    # The model and its files.
    "dtype": Named("dtype", one_of("dtype", {"float": "float32"}, "there is no such format")),
    "max_model_len": Named("max_model_len", length),
    "generation_config": Named("generation_config", lambda text: "none" if text == "vllm" else text),
    "load_format": Named("load_format", one_of("load_format", LOAD_FORMATS, NO_FORMAT)),
    "quantization": Partly("quantization", STORED_FORMATS, "how weights are stored is read from the checkpoint itself"),
    "trust_remote_code": Idle(NO_CODE),
    "tokenizer_mode": Idle("tokenizers come from tokenizer.json", 1, only=("auto", "hf", "fast")),
    "skip_tokenizer_init": Idle("a folder without tokenizer.json serves token ids"),
    "hf_token": Refused("a flag can be seen by all users of the machine: set HF_TOKEN"),
    "hf_config_path": Refused("config.json comes from the model's folder: see --hf-overrides"),
    "config_format": Idle("config.json is in Hugging Face format", 1, only=("auto", "hf")),
    "model_impl": Named("model_implementation", lambda text: "kvern" if text == "vllm" else text),
    "code_revision": Idle(NO_CODE, 1),
    "tokenizer_revision": Refused("give --tokenizer the folder of that revision"),
    "task": Idle(POOLING, 1, only=("auto", "generate", "embed", "embedding", "score")),
    "runner": Idle(POOLING, 1, only=("auto", "generate", "pooling")),
    "convert": Idle(POOLING, 1, only=("auto", "none", "embed", "classify")),
    "ignore_patterns": Idle("nothing but safetensors, JSON and templates is downloaded", MANY),
    "safetensors_load_strategy": Idle("weights are read in pieces, straight into their place", 1),
    "model_loader_extra_config": Refused(NO_FORMAT),
    "disable_sliding_window": Refused("each layer attends to what config.json says; see --hf-overrides"),
    "enable_sleep_mode": Refused("models of a server of several sleep by themselves; the one of another ends", 0),
    "enable_prompt_embeds": Refused("prompts are texts or token ids", 0),
    "language_model_only": Idle(MEDIA, silent=True),
    # Memory.
    "gpu_memory_utilization": Named("gpu_memory_share"),
    "kv_cache_dtype": Named(
        "kv_cache_dtype",
        one_of("kv_cache_dtype", {"half": "float16", "fp8_e4m3": "fp8"}, "8-bit keys and values are e4m3 or integers"),
    ),
    "kv_cache_memory_bytes": Refused("the cache is sized by --kv-cache-tokens, or by --gpu-memory-share"),
    "num_gpu_blocks_override": Refused("the cache is sized in tokens: --kv-cache-tokens, blocks times --block-size"),
    "swap_space": HostMemory("GiB"),
    "kv_offloading_size": HostMemory("GiB"),
    "kv_offloading_backend": Idle("host memory is kvern's own", 1),
    "enable_hierarchical_cache": HostMemory(takes=0),  # this and the next two are SGLang's
    "hicache_size": HostMemory("GB"),
    "hicache_ratio": Idle("host memory for the KV cache is sized by --kv-tier host:SIZE", 1),
    "cpu_offload_gb": Idle("weights stay on the device whole", 1, only=("0", "0.0")),
    "calculate_kv_scales": Idle("scales of keys and values that a checkpoint lacks are measured at the start"),
    "enable_prefix_caching": Switch("prefix_cache"),
    "prefix_caching_hash_algo": Idle("blocks are named by BLAKE2b digests of 128 bits", 1),
    "disable_hybrid_kv_cache_manager": Switch("windowed_kv_cache", yes="off", no="auto"),
    # Scheduling.
    "max_num_seqs": Named("max_batch_requests", human_number),
    "max_num_batched_tokens": Named("max_batch_tokens", human_number),
    "max_waiting_queue_length": Named("max_queue"),
    "enable_chunked_prefill": Switch("chunked_prefill"),
    "scheduling_policy": Named("policy", one_of("policy", {}, "there is no such policy")),
    "scheduler_cls": Refused("policies are --policy's"),
    "num_scheduler_steps": Idle("a step is planned while the one before is computed", 1),
    "scheduler_delay_factor": Idle("prompts are never held back", 1, only=("0", "0.0")),
    "preemption_mode": Idle("a request that must make room is computed again", 1, only=("recompute",)),
    "async_scheduling": Switch("overlap"),
    # Kernels.
    "enforce_eager": Switch("cuda_graphs", yes=False, no=True),
    "attention_backend": Named("attention_backend", one_of("attention_backend", BACKENDS, "there is no such backend")),
    "disable_cascade_attn": Switch("shared_prefix_attention", yes=False, no=True),
    # Several devices.
    "data_parallel_size_local": Idle("engines of --data-parallel-size run on this machine, or where Ray finds room", 1),
    "nnodes": Idle(SEVERAL_MACHINES, 1, only=ONE),
    "distributed_executor_backend": Named("executor", lambda name: "processes" if name in ("mp", "uni") else name),
    "max_parallel_loading_workers": Idle(ONE_PROCESS, 1),
    "num_redundant_experts": Named("redundant_experts"),
    "enable_eplb": Switch("rebalance_experts", yes="60s", no="none"),
    "eplb_config": Refused(EXPERTS),
    "expert_placement_strategy": Idle("experts are dealt out in turns; see --rebalance-experts", 1),
    "data_parallel_backend": Idle(SEVERAL_MACHINES, 1, only=("mp",)),
    "headless": Refused(ONE_DEVICE, 0),
    "api_server_count": Idle(ONE_PROCESS, 1),
    "disable_frontend_multiprocessing": Idle(f"{ONE_PROCESS}: requests survive the engine's death"),
    # Adapters.
    "enable_lora": Idle("there are places for adapters when there are adapters", silent=True),
    "lora_modules": Named("adapter", adapter, MANY),
    "max_loras": Named("max_adapters"),
    "max_lora_rank": Named("max_adapter_rank"),
    "max_cpu_loras": Idle("all adapters that are loaded wait in host memory", 1),
    "lora_dtype": Idle("adapters have the model's dtype", 1, only=("auto",)),
    "lora_extra_vocab_size": Idle("adapters add no tokens", 1, only=("0", "256")),
    # Answers.
    "tool_call_parser": Named("tool_parser", one_of("tool_parser", TOOL_PARSERS, "there is no such parser")),
    "reasoning_parser": Named(
        "reasoning_parser", one_of("reasoning_parser", REASONING_PARSERS, "there is no such parser")
    ),
    "guided_decoding_backend": grammar_backend,
    "structured_outputs_config": Backend(grammar_backend),
    "structured_outputs_config.backend": grammar_backend,
    "logits_processor_pattern": Refused("requests may name the processors of --logits-processors"),
    "chat_template_content_format": Idle("contents have the form that the template reads", 1),
    "default_chat_template_kwargs": Named("chat_template_kwargs"),
    "trust_request_chat_template": Refused("requests cannot bring templates: see --chat-template", 0),
    "response_role": Idle("answers are the assistant's", 1, only=("assistant",)),
    "max_logprobs": Idle("requests may ask for as many as the API allows", 1),
    "logprobs_mode": Idle(
        "log-probabilities are the model's own, before sampling parameters", 1, only=("raw_logprobs",)
    ),
    "return_tokens_as_token_ids": Refused("requests ask for it: return_token_ids", 0),
    # The server.
    "ssl_certfile": Named("tls_cert"),
    "ssl_keyfile": Named("tls_key"),
    "ssl_ca_certs": Refused("clients show keys, not certificates: see --api-key"),
    "ssl_cert_reqs": Idle("clients show keys, not certificates: see --api-key", 1, only=("0",)),
    "enable_ssl_refresh": Idle("certificates are read at the start"),
    "shutdown_timeout": Named("grace_seconds"),
    "middleware": Refused("put a proxy before the server"),
    "enable_force_include_usage": Refused("requests ask for it: stream_options", 0),
    "disable_fastapi_docs": Idle("/docs is a page without scripts of others"),
    "allowed_local_media_path": Named("media_dir"),
    # What it says.
    "enable_log_requests": Switch("log_requests", yes="summary", no="none"),
    "disable_log_stats": Idle("figures are at /metrics", silent=True),
    "enable_log_outputs": Refused("answers are never written to a log", 0),
    "log_config_file": Refused(LOGS),
    "log_error_stack": Idle(LOGS),
    "show_hidden_metrics_for_version": Idle("all figures are at /metrics", 1),
}

ALIKE: dict[Rule, tuple[str, ...]] = {
    Idle(MEDIA, 1): (
        "default_mm_loras", "mm_encoder_attn_backend", "mm_shm_cache_max_object_size_mb",
        "video_pruning_rate", "limit_mm_per_prompt", "mm_processor_kwargs", "mm_processor_cache_gb",
        "mm_encoder_tp_mode", "media_io_kwargs", "mm_processor_cache_type",
    ),
    Idle(MEDIA): (
        "disable_chunked_mm_input", "enable_multimodal_encoder_data_parallel", "interleave_mm_strings",
        "skip_mm_profiling", "disable_mm_preprocessor_cache",
    ),
    Idle(NO_COMPILER, 1): (
        "compilation_config", "optimization_level", "max_cudagraph_capture_size", "max_seq_len_to_capture",
    ),
    Idle(NO_COMPILER, MANY): ("cudagraph_capture_sizes", "cuda_graph_sizes"),
    Idle(SPLIT, 1): ("max_num_partial_prefills", "max_long_partial_prefills", "long_prefill_token_threshold"),
    Refused("parsers are kvern's own"): ("tool_parser_plugin", "reasoning_parser_plugin"),
    Idle("heads of requests are bounded", 1): ("h11_max_incomplete_event_size", "h11_max_header_count"),
    Idle(ALWAYS, silent=True): (
        "enable_auto_tool_choice", "enable_reasoning", "enable_request_id_headers", "enable_prompt_tokens_details",
        "enable_server_load_tracking",
    ),
    Idle(ONE_DEVICE): ("disable_custom_all_reduce", "fully_sharded_loras"),
    Idle(ONE_DEVICE, 1, only=ONE): ("decode_context_parallel_size", "prefill_context_parallel_size"),
    Idle(LOGS, 1): ("uvicorn_log_level", "max_log_len"),
    Idle("traces have all details", 1): ("collect_detailed_traces",),
    Idle(LOGS, silent=True): ("use_tqdm_on_load", "disable_uvicorn_access_log", "disable_log_requests"),
    Refused(ONE_DEVICE): ("all2all_backend", "enable_dbo", "ray_workers_use_nsight"),
    Refused(SEVERAL_MACHINES): (
        "data_parallel_address", "data_parallel_external_lb", "data_parallel_hybrid_lb", "data_parallel_rank",
        "data_parallel_rpc_port", "data_parallel_start_rank", "master_addr", "master_port", "node_rank",
    ),
    Refused("embeddings are no prompts"): ("enable_mm_embeds",),
    Refused("give it by --hf-overrides"): ("rope_scaling", "rope_theta"),
    Refused("vectors have the form that the model's own files say"): ("pooler_config", "override_pooler_config"),
    Refused("there are no models of such layers"): ("mamba_block_size", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
    Refused(NO_TRANSFER): ("kv_transfer_config", "ec_transfer_config"),
    Refused(NO_PLUGIN): ("worker_cls", "worker_extension_cls", "io_processor_plugin", "additional_config"),
    Refused(NO_DRAFT): ("num_speculative_tokens", "num_lookahead_slots"),
    Speculation(NO_DRAFT): ("speculative_config",),
    Named("draft_model"): ("speculative_model",),
    Refused("grammars allow what the schema allows: change the schema"): (
        "guided_decoding_disable_additional_properties", "guided_decoding_disable_any_whitespace",
    ),
    Idle("kvern's own kernels are chosen by what was fastest here", 1): (
        "attention_config", "kernel_config", "moe_backend",
    ),
    Idle("layers that share keys and values do so always", silent=True): ("kv_sharing_fast_prefill",),
    Idle("a grammar that a backend cannot follow is refused"): ("guided_decoding_disable_fallback",),
    Idle(LOGS): ("aggregate_engine_logging",),
    Idle("weights are read straight into their place", 1): ("pt_load_map_location",),
}  # fmt: skip
VLLM |= {name: rule for rule, names in ALIKE.items() for name in names}

VLLM_BENCH: dict[str, Rule] = {
    "trust_remote_code": Idle("no code of models is run", silent=True),
    "tokenizer_mode": VLLM["tokenizer_mode"],
    "endpoint_type": Named("backend"),
    "request_id_prefix": Idle("requests have the ids that the server gives them", 1),
}
"""Flags of `vllm bench serve`."""

SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dpl": "data_parallel_size_local",
    "-dcp": "decode_context_parallel_size",
    "-n": "nnodes",
    "-q": "quantization",
    "-O": "optimization_level",
    "-cc": "compilation_config",
    "-sc": "speculative_config",
    "-asc": "api_server_count",
}
"""Short flags."""
