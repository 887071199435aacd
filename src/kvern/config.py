"""Every option of the engine, with the decisions that follow from them when nothing is given."""

import contextlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from kvern.errors import ConfigError, without_passwords
from kvern.io.bytecode import cache_home

DEFAULT_MODEL = "kvern-12m"
NAMING = frozenset({"model", "revision", "served_model_name"})
"""Options that say what a model is called."""
DEFAULT_ADAPTERS = 8
LARGEST_RANK = 128
LONGEST_SECONDS = 10_000_000
OPTIONAL = "?optional"
"""The end of an option of `kv_tier` that is ignored where there can be no store."""
LONGEST_SILENCE = 60.0
"""The seconds without a sign of life for work that an engine does for the first time, by default."""


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine; each is a flag, an environment variable and a configuration key of the same name."""

    model: str | None = None
    """Folder, Hugging Face id, or the name of an embedded model. None: the embedded chat model."""
    revision: str | None = None
    """Branch, tag or commit of the Hugging Face repository."""
    download_dir: str | None = None
    """Folder for downloads from the Hugging Face hub. None: the hub's own cache, HF_HUB_CACHE."""
    tokenizer: str | None = None
    """Tokenizer and chat template to use: a folder, Hugging Face id, or embedded model. None: the model's."""
    chat_template: str | None = None
    """Jinja template that replaces the model's: a file, or the template itself."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """JSON object of variables for the template, such as {"enable_thinking": false}; those of requests take
    precedence."""
    hf_overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """JSON object whose values replace those of the model's config.json. Changed models are stored below cache_dir."""
    generation_config: str = "auto"
    """Source of sampling defaults: auto takes the model's file, none takes no file, else a folder with the file."""
    override_generation_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """JSON object whose values replace those defaults: temperature, top_k, top_p, min_p, repetition_penalty, do_sample,
    eos_token_id."""
    dtype: Literal["auto", "bfloat16", "bf16", "float16", "fp16", "half", "float32", "fp32"] = "auto"
    """Number format of weights and activations; auto takes the checkpoint's."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto reads the safetensors files; dummy makes random weights from config.json, for benchmarks."""
    model_implementation: Literal["auto", "kvern", "transformers"] = "auto"
    """Code that computes the model: kvern's or that of transformers, an optional package, which is slower.
    auto takes kvern's if it knows the model's architecture."""
    quantization: Literal["fp8", "int8", "int4"] | None = None
    """Format to which plain weights are quantized while they are loaded: fp8 or int8, with a scale for each row, or
    int4, with a scale for 32 inputs. None: as they are; weights that are stored quantized are recognized in any
    case."""
    head_quantization: Literal["auto", "int8", "none"] = "auto"
    """Format of a plain output layer, and of the embeddings if they are the same matrix: int8 has a scale for each
    token. auto takes int8 on a CPU where quantization is int8 or int4, and leaves it plain elsewhere, as none does."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto takes a GPU if there is one."""
    tensor_parallel_size: int = 1
    """Processes that compute the model with tensor parallelism, each with a share of its weights and of its KV cache:
    one for each GPU, or several on a CPU. A rank that waits for another for half of engine_timeout, or 30 s, gives up,
    and a server restarts the engine."""
    executor: Literal["processes", "ray"] = "processes"
    """Place of the processes of engines and their ranks: processes on this machine, or ray on nodes of the cluster that
    RAY_ADDRESS names, where each rank gets a GPU, or as many processors as threads says."""
    enable_expert_parallel: bool = False
    """Place whole experts of a mixture on the ranks of tensor_parallel_size, instead of a part of each on all."""
    enable_dp_attention: bool = False
    """Data-parallel attention: each rank of tensor_parallel_size computes everything but experts for its own requests,
    and has their KV cache. Ranks share only the experts, which serve the rows of all."""
    redundant_experts: int = 0
    """Copies of busy experts in each layer, in addition to all experts, with enable_expert_parallel."""
    rebalance_experts: str | None = None
    """Interval such as 60s after which whole experts are redistributed among ranks by their load, between steps. None:
    they stay where they are."""
    pipeline_parallel_size: int = 1
    """Pipeline stages, each with some of the model's layers on tensor_parallel_size processes, which compute different
    steps at a time."""
    threads: int | None = None
    """CPU threads for the model. None: OMP_NUM_THREADS, else the physical cores of one memory node that the process may
    use, limited by the CPU time of its control group."""
    data_parallel_size: int = 1
    """Engines behind one server, each with a copy of the model: on a GPU each, or on a share of the processor's cores
    each. A request goes where most of its prompt is cached, or to the engine with the least load."""
    prefill_engines: int = 0
    """Engines of the server that compute long prompts, with which decode_engines go on: answers do not wait for prompts
    of others. Keys and values go from one to the other through kv_tier, by default host memory. 0: all engines do
    both."""
    decode_engines: int = 0
    """Engines beside prefill_engines, which compute answers and short prompts."""
    role: Literal["both", "prefill", "decode"] = "both"
    """prefill: the server also computes long prompts for servers of other machines, which read keys and values at its
    kv_tier_listen and hand prompts over at the port behind it. decode: it hands long prompts to those at
    prefill_server."""
    prefill_server: tuple[str, ...] = ()
    """Servers with the role prefill, each by the HOST:PORT of its kv_tier_listen."""
    max_model_len: int | None = None
    """Longest sequence in tokens, prompt and answer. None: the model's context, as far as the memory allows."""
    kv_cache: Literal["paged", "contiguous"] = "paged"
    """paged allocates blocks as sequences grow; contiguous reserves max_model_len for each running request."""
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8", "int8"] = "auto"
    """Number format of keys and values; auto takes the model's, but float32 for float16 on a CPU. fp8 (e4m3) and int8
    store twice as many tokens, with scales that the checkpoint has or that are measured at the start."""
    kv_cache_tokens: int | None = None
    """Size of the KV cache in tokens. None: from the free memory and the largest batch."""
    gpu_memory_share: float | None = None
    """Share of the GPU's total memory that this process may use, from 0 to 1, such as 0.4 if two servers share a card;
    no effect on a CPU. None: the free memory."""
    enable_sleep: bool = False
    """Let the engine give back the memory of a GPU while its model is asleep; several models in one server have it by
    themselves. On a CPU every engine can."""
    elastic_kv_cache: bool = False
    """Take and give back the memory of the KV cache in chunks while the engine runs: several models in one server agree
    on it by themselves, and one alone has all of it."""
    block_size: int = 16
    """Tokens in one block of the paged cache."""
    prefix_cache: bool = True
    """Keep the keys and values of finished requests and reuse them for prompts with the same beginning."""
    windowed_kv_cache: Literal["auto", "on", "off"] = "auto"
    """Free blocks of layers with a sliding window as the window moves on; auto does so where it is possible."""
    batching: Literal["continuous", "static"] = "continuous"
    """continuous lets requests join and leave at every step; static runs a batch until its last request ends."""
    chunked_prefill: bool = True
    """Split long prompts over several steps, so that other requests continue meanwhile."""
    policy: Literal["fcfs", "priority", "sjf", "prefix"] = "fcfs"
    """Order of admission: first come, lowest priority number, shortest job, or longest cached prefix."""
    aging_steps: int = 1000
    """Steps after which a waiting request goes before all that have waited less, with any policy."""
    max_batch_tokens: int | None = None
    """Most tokens in one step. None: 1024 on a CPU, 8192 on a GPU."""
    target_itl: str | None = None
    """Time between the tokens of an answer that prompts in the same steps may cause, such as 15ms or 0.015s; none: no
    limit. Prompts are spread over as many steps as that takes. None: three times a decode step, longer for prompts that
    have waited; no limit if no client waits for single tokens, on a CPU, and with pipeline_parallel_size."""
    max_batch_requests: int | None = None
    """Most requests that run at the same time. None: 256 on a CPU, 512 on a GPU. With enable_dp_attention the limit is
    that of each rank."""
    attention_backend: Literal["auto", "triton", "flashinfer", "flash_attn", "torch_sdpa"] = "auto"
    """Implementation of attention on a GPU; auto times those that are installed and remembers the fastest."""
    linear_backend: Literal["auto", "cublas", "triton"] = "auto"
    """Implementation of matrix products on a GPU; auto times both for each shape and batch size and remembers the
    faster."""
    triton_kernels: bool = True
    """Use kvern's own kernels on a GPU; without them PyTorch computes everything, slowly."""
    cpu_kernels: bool = True
    """Use kvern's own kernels on a CPU. A C++ compiler builds them in the background of the first start; PyTorch
    computes until then, and without them."""
    cuda_graphs: bool = True
    """Launch each decode step on a GPU as one CUDA graph."""
    shared_prefix_attention: bool = True
    """Read blocks that decoding requests share at their beginning once for all of them, on a GPU."""
    proposer: str | None = None
    """Source of drafts, which one step verifies: ngram searches the text for the same tokens, suffix also other
    answers, remote asks the server at draft_url; or an entry point of an installed package. None: no drafts."""
    draft_url: str | None = None
    """URL of another server of OpenAI's API, with a smaller model, for proposer remote."""
    draft_as_text: bool = False
    """Exchange text with the server at draft_url, because its model has other tokens; drafts then ignore the
    temperature."""
    draft_model: str | None = None
    """Draft model with the same vocabulary, or a draft head: a folder, Hugging Face id, or embedded model; mtp: the
    layer in the model's own checkpoint. None: the one made for an embedded model, else none."""
    draft_quantization: Literal["fp8", "int8", "int4"] | None = None
    """Format to which plain weights of draft_model are quantized, independent of quantization."""
    speculation: Literal["auto", "off"] = "auto"
    """auto verifies as many drafts as save time, if there is a source of drafts; off uses none."""
    acceptance: Literal["coupled", "rejection"] = "coupled"
    """coupled accepts drafts that equal the sampled tokens, so that they change no token; rejection (Leviathan et al.
    2023) accepts more of a draft model's or head's, and tokens then depend on drafts, though their distribution does
    not."""
    kv_tier: tuple[str, ...] = ()
    """Stores that keep the KV cache of prompts outside the device, the nearest first: host:32GB, or host for a quarter
    of the free memory; peer, the host memory of the server's other engines on this machine; disk:/path:500GB;
    valkey://host:port, or valkeys:// for TLS; mooncake://host:port; nixl://host:port, the host memory of another
    machine's engines. Prompts continue from them where that is faster than computing. With ?optional behind it a store
    is left out, with a warning, where there can be none."""
    kv_tier_listen: str | None = None
    """HOST:PORT of this machine at which servers of other machines, with kv_tier nixl://HOST:PORT, read what engines
    keep in host memory. Those that know the secret in KV_PEER_KEY may; nothing is encrypted on the way."""
    kv_tier_heads: bool = False
    """Keep each KV head by itself in host memory, and read such pages from other servers: these may have another
    tensor_parallel_size then, as prefill and decode servers of unequal sizes do. Both sides need it. It costs a copy
    and more work for each page."""
    kv_events_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """JSON object that says where to publish which blocks the prefix cache has, as vLLM does, for routers of fleets:
    enable_kv_cache_events, endpoint, replay_endpoint, topic, buffer_steps, hwm, bind. Events contain the tokens of
    prompts and answers, and nothing is encrypted."""
    kv_tier_max_age: str | None = None
    """Age after which a page on a disk or a Valkey server is not used any more and is removed: seconds, or such as 90m,
    12h or 7d. None: pages stay until they are evicted."""
    logits_processors: tuple[str, ...] = ()
    """Custom logits processors that requests may use: entry points of installed packages, applied in this order."""
    overlap: bool = True
    """Prepare the next step while a GPU computes the current one."""
    deterministic: bool = False
    """Make a request's logits bit for bit the same in any batch. It costs speed on a GPU; on a CPU it requires kvern's
    kernels, whose build it waits for, and no adapters."""
    cache_dir: str | None = None
    """Folder for built kernels, measurements of this GPU, and models with changed files. None: kvern's folder in the
    user's cache folder."""
    tool_parser: Literal[
        "auto",
        "none",
        "harmony",
        "hermes",
        "qwen3_coder",
        "minimax",
        "minimax_m3",
        "seed",
        "deepseek_v32",
        "deepseek_v4",
        "kimi_k3",
        "hy3",
        "minicpm5",
        "functionary",
        "functionary_v32",
        "muse",
        "glm",
        "mistral",
        "gemma4",
        "functiongemma",
        "deepseek",
        "kimi_k2",
        "solar",
        "pythonic",
        "lfm2",
        "llama",
        "granite",
        "phi4_mini",
        "functools",
        "nemotron",
        "tool_calls",
        "json",
    ] = "auto"
    """Format of tool calls in the model's text; auto finds it in the chat template, none leaves calls in the text."""
    reasoning_parser: Literal[
        "auto",
        "none",
        "think",
        "mistral",
        "seed",
        "gemma4",
        "minimax_m3",
        "cohere",
        "kimi_k3",
        "solar",
        "muse",
        "apertus",
        "apriel",
        "harmony",
    ] = "auto"
    """Format of reasoning in the model's text; auto finds it in the chat template, none leaves it in the text."""
    adapters: Mapping[str, str] = field(default_factory=dict, hash=False)
    """LoRA adapters in PEFT's format by name: --adapter NAME=FOLDER, once for each adapter."""
    max_adapters: int | None = None
    """Most adapters on the device at the same time; others wait in host memory. None: 8 if there are adapters, else
    0."""
    max_adapter_rank: int = 64
    """Highest rank of an adapter, 128 at most; a GPU reserves memory for it."""
    request_records: bool = True
    """Note for each request what it waited for, its steps and its longest gap: for kvern explain, metrics and the
    access log."""
    trace_layers: int | None = None
    """Measure the time of each layer and of its parts in one step of so many, such as 100: in /metrics, /v1/engines and
    kvern top. None: in none."""
    expert_counts: bool = False
    """Count the tokens of each expert of each layer in /metrics; some models have thousands of experts."""
    seed: int = 0
    """Seed from which requests without a seed of their own derive theirs."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model in a server's API. None: the name that it was started with."""
    engine_timeout: float | None = None
    """Seconds without a sign of life after which a server replaces the engine. None: 10, or more if steps are slow, and
    a minute for work that was not done before."""

    def __post_init__(self) -> None:
        sizes = "max_model_len", "kv_cache_tokens", "block_size", "max_batch_requests"
        processes = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
        for name in ("threads", *processes, "aging_steps", "trace_layers", *sizes):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: it must be at least 1")
        if self.engine_timeout is not None and not 0 < self.engine_timeout <= LONGEST_SECONDS:
            limits = f"above 0 and {LONGEST_SECONDS} at most"
            raise ConfigError(f"engine_timeout is {self.engine_timeout}: it must be a number of seconds, {limits}")
        if self.gpu_memory_share is not None and not 0 < self.gpu_memory_share <= 1:
            raise ConfigError(f"gpu_memory_share is {self.gpu_memory_share}: it must be above 0 and 1 at most")
        for name in ("adapters", "chat_template_kwargs", "hf_overrides", "override_generation_config"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: it must map names to values")
        self._divide_engines()
        self._divide_servers()
        self._check_tiers()
        self._check_experts()
        requests = self.max_batch_requests or 1
        if self.max_batch_tokens is not None and self.max_batch_tokens < requests:
            raise ConfigError(
                f"max_batch_tokens is {self.max_batch_tokens}, below max_batch_requests {requests}: "
                "a step must have room for one token of each running request; raise the first or lower the second"
            )
        if self.max_adapters is not None and self.max_adapters < (1 if self.adapters else 0):
            raise ConfigError(f"max_adapters is {self.max_adapters} with {len(self.adapters)} adapters: raise it")
        if not 1 <= self.max_adapter_rank <= LARGEST_RANK:
            raise ConfigError(f"max_adapter_rank is {self.max_adapter_rank}: it must be from 1 to {LARGEST_RANK}")
        if self.proposer is not None and self.draft_model is not None:
            raise ConfigError(
                f"proposer is {self.proposer} and draft_model {self.draft_model}: leave one out, one alone can guess"
            )
        if self.draft_quantization is not None and self.draft_model in (None, "mtp"):
            named = (
                "nobody" if self.draft_model is None else "mtp, a layer of the model's own, which quantization is for"
            )
            raise ConfigError(
                f"draft_quantization is {self.draft_quantization}, and draft_model names {named}: name a draft model"
            )
        if self.proposer == "remote" and self.draft_url is None:
            raise ConfigError("proposer is remote, which asks another server: name it by draft_url")
        if self.draft_as_text and self.draft_url is None:
            raise ConfigError("draft_as_text is on, and says how the server at draft_url is asked: give that, too")
        if self.draft_url is not None:
            if self.proposer != "remote":
                raise ConfigError(f"draft_url is {self.draft_url}, and nobody asks it: give proposer remote, too")
            if not self.draft_url.startswith(("http://", "https://")):
                raise ConfigError(f"draft_url is {self.draft_url!r}: it must begin with http:// or https://")
        if self.target_itl is not None:
            read_seconds("target_itl", self.target_itl)
        for name, options in _CHOICES.items():
            if getattr(self, name) not in options:
                choices = ", ".join(filter(None, options))
                raise ConfigError(f"{name} is {getattr(self, name)!r}: it must be one of {choices}")

    def _divide_engines(self) -> None:
        """Sets the number of engines, and a tier that hands prompts over, if there are prefill engines.

        Raises ConfigError.
        """
        given = f"prefill_engines is {self.prefill_engines} and decode_engines {self.decode_engines}"
        engines = self.prefill_engines + self.decode_engines
        if min(self.prefill_engines, self.decode_engines) < 0 or (
            engines and not (self.prefill_engines and self.decode_engines)
        ):
            raise ConfigError(f"{given}: give at least 1 of each, or neither")
        if not engines:
            return
        if self.data_parallel_size not in (1, engines):
            raise ConfigError(
                f"{given}, and data_parallel_size is {self.data_parallel_size}: leave it out, or make it {engines}"
            )
        if not self.prefix_cache:
            raise ConfigError(f"{given}, which needs the prefix cache, which is off: turn prefix_cache on")
        if self.enable_dp_attention:
            raise ConfigError(f"{given}, and enable_dp_attention on: ranks find only their own pages; leave one out")
        object.__setattr__(self, "data_parallel_size", engines)
        kinds = [option.removesuffix(OPTIONAL).partition(":")[0] for option in self.kv_tier]
        if not kinds:
            object.__setattr__(self, "kv_tier", ("host", "peer"))
        elif "host" in kinds and "peer" not in kinds:
            at = kinds.index("host") + 1
            object.__setattr__(self, "kv_tier", (*self.kv_tier[:at], "peer", *self.kv_tier[at:]))
        if self.executor == "ray" and not {*kinds} - {"host", "peer"}:
            raise ConfigError(
                f"{given}, and executor ray with kv_tier {self.shown_kv_tier}, memory of one machine: name a store "
                "that all nodes reach, such as valkey://host:6379"
            )

    def _divide_servers(self) -> None:
        """Sets a tier that hands prompts over between servers, if the role asks for one. Raises ConfigError."""
        if self.role == "both" and not self.prefill_server:
            return
        if (self.role == "decode") != bool(self.prefill_server):
            raise ConfigError(
                f"role is {self.role} and prefill_server {', '.join(self.prefill_server) or 'not given'}: a server "
                "with the role decode, and no other, names those with the role prefill"
            )
        if self.role == "prefill" and self.kv_tier_listen is None:
            raise ConfigError("role is prefill: give kv_tier_listen, the HOST:PORT at which others read the pages")
        if not self.prefix_cache or self.enable_dp_attention or self.prefill_engines:
            raise ConfigError(
                f"role is {self.role}, which needs the prefix cache, and goes neither with enable_dp_attention nor "
                "with prefill_engines: turn prefix_cache on, and leave the others out"
            )
        stores = ["host"] if self.role == "prefill" else [f"nixl://{server}" for server in self.prefill_server]
        given = [option.removesuffix(OPTIONAL) for option in self.kv_tier]
        missing = [store for store in stores if store not in (*given, *(option.partition(":")[0] for option in given))]
        object.__setattr__(self, "kv_tier", (*self.kv_tier, *missing))

    def _check_tiers(self) -> None:
        """Raises ConfigError for options of tiers without what they need."""
        if self.needed_tiers and not self.prefix_cache:
            raise ConfigError(
                f"kv_tier {self.shown_kv_tier} needs the prefix cache, which is off: leave kv_tier out, or turn "
                "prefix_cache on"
            )
        kinds = {option.removesuffix(OPTIONAL).partition(":")[0] for option in self.kv_tier}
        if "peer" in kinds and "host" not in kinds:
            raise ConfigError(
                f"kv_tier is {self.shown_kv_tier}: peer reads the host memory of a server's other engines, which only "
                "those with host have: give host, too"
            )
        if self.kv_tier_listen is not None and ("host" not in kinds or self.executor == "ray"):
            raise ConfigError(
                f"kv_tier_listen is {self.kv_tier_listen}: it offers the host memory of engines on this machine, of "
                "which there is none: give kv_tier host, and leave executor ray out"
            )
        if self.kv_tier_heads and ("peer" in kinds or not kinds & {"host", "nixl"}):
            raise ConfigError(
                f"kv_tier_heads is on, and kv_tier {self.shown_kv_tier or 'not given'}: it is for host and nixl beside "
                "servers of other sizes, and peer reads whole pages: leave one out"
            )
        if self.kv_tier_max_age is not None and not self.kv_tier:
            raise ConfigError(
                f"kv_tier_max_age is {self.kv_tier_max_age}, and there is no kv_tier: leave it out, or give kv_tier"
            )

    def _check_experts(self) -> None:
        """Raises ConfigError for options of experts that exclude each other."""
        if self.redundant_experts < 0 or (self.redundant_experts and not self.enable_expert_parallel):
            raise ConfigError(
                f"redundant_experts is {self.redundant_experts}: it must be 0, or more with enable_expert_parallel"
            )
        if self.rebalance_seconds and not self.enable_expert_parallel:
            raise ConfigError(
                f"rebalance_experts is {self.rebalance_experts}, and enable_expert_parallel off: turn it on, or leave "
                "rebalance_experts out"
            )
        if self.enable_dp_attention and self.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_dp_attention is on, and tensor_parallel_size is 1: raise it to the ranks that are to share "
                "experts, or leave enable_dp_attention off"
            )
        if self.enable_expert_parallel and self.data_parallel_size > 1 and self.tensor_parallel_size == 1:
            raise ConfigError(
                f"data_parallel_size is {self.data_parallel_size}, and enable_expert_parallel on: engines beside each "
                f"other share no experts; for ranks that do, with requests of their own, give tensor_parallel_size "
                f"{self.data_parallel_size} and enable_dp_attention instead of data_parallel_size"
            )

    @property
    def needed_tiers(self) -> tuple[str, ...]:
        """The options of `kv_tier` that are refused where there can be no store."""
        return tuple(option for option in self.kv_tier if not option.endswith(OPTIONAL))

    @property
    def shown_kv_tier(self) -> str:
        """`kv_tier` for messages."""
        return without_passwords(" ".join(option.removesuffix(OPTIONAL) for option in self.kv_tier))

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that are not their defaults, for those who watch or compare servers: without the model's names
        and without passwords."""
        plain, names = EngineConfig(), (option.name for option in fields(self) if option.name not in NAMING)
        return {
            name: _without_passwords(getattr(self, name))
            for name in names
            if getattr(self, name) != getattr(plain, name)
        }

    @property
    def target_itl_seconds(self) -> float | None:
        """`target_itl` in seconds; 0 is no limit, None if the option is not given."""
        return None if self.target_itl is None else read_seconds("target_itl", self.target_itl)

    @property
    def rebalance_seconds(self) -> float:
        """`rebalance_experts` in seconds; 0 if experts stay where they are."""
        return read_seconds("rebalance_experts", self.rebalance_experts or "none")

    def has_int8_head(self, device: str, *, draft: bool = False) -> bool:
        """Returns whether a plain output layer of the model, or of the `draft` model, becomes INT8 on such a device."""
        if self.head_quantization == "auto" or draft:
            made = self.draft_format if draft else self.quantization
            return self.head_quantization != "none" and device == "cpu" and made in ("int8", "int4")
        return self.head_quantization == "int8"

    @property
    def draft_format(self) -> str | None:
        """The format of plain weights of the draft model: INT8 where it is the one that an embedded model brings along,
        on CPUs alone. None: as they are stored.
        """
        return "int8" if self.draft_model is None else self.draft_quantization

    @property
    def has_drafts(self) -> bool:
        """True if an option selects a source of drafts."""
        return self.speculation != "off" and (self.proposer is not None or self.draft_model is not None)

    @property
    def ranks(self) -> int:
        """The number of processes that compute the model, ordered by pipeline stage."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def dp_attention_size(self) -> int:
        """The number of ranks that have their own requests and KV cache."""
        return self.ranks if self.enable_dp_attention else 1

    @property
    def first_rank(self) -> int:
        """The rank in the engine's own process: the first of the last stage, where tokens are sampled."""
        return self.ranks - self.tensor_parallel_size

    @property
    def rank_timeout(self) -> float:
        """The seconds that a rank waits for another before the engine counts as dead."""
        return self.longest_silence / 2

    @property
    def longest_silence(self) -> float:
        """The longest time without a sign of life from an engine, whatever it does."""
        return LONGEST_SILENCE if self.engine_timeout is None else self.engine_timeout

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names for a server's clients; at least one."""
        return self.served_model_name or (self.model or DEFAULT_MODEL,)

    @property
    def cache_folder(self) -> Path:
        """The folder for builds, measurements and changed models."""
        if self.cache_dir is not None:
            return Path(self.cache_dir).expanduser()
        return cache_home()

    @property
    def adapter_places(self) -> int:
        """The most adapters on the device at the same time; 0 if there can be none."""
        if self.max_adapters is not None:
            return self.max_adapters
        return DEFAULT_ADAPTERS if self.adapters else 0


def read_seconds(name: str, text: str) -> float:
    """Returns a time such as 15ms or 0.015s in seconds; 0 and none are 0. Raises ConfigError."""
    text = str(text)  # Python code and option files may give numbers, which have no unit
    number = 0.0 if text in ("none", "0") else -1.0
    for unit, factor in (("ms", 0.001), ("s", 1.0)):
        if number < 0 and text.endswith(unit):
            with contextlib.suppress(ValueError):
                number = float(text.removesuffix(unit)) * factor
    if not 0 <= number <= LONGEST_SECONDS:
        raise ConfigError(f"{name} is {text!r}: it must be a time like 15ms or 0.015s, or none")
    return number


def _without_passwords(value: Any) -> Any:
    if isinstance(value, str):
        return without_passwords(value)
    return [_without_passwords(item) for item in value] if isinstance(value, tuple) else value


def choices_of(kind: Any) -> tuple[str | None, ...]:
    """Returns the values of an option with a fixed choice, None if it is optional; empty for other options."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    kinds = typing.get_args(kind)
    if len(kinds) == 2 and kinds[1] is type(None) and typing.get_origin(kinds[0]) is Literal:
        return (*typing.get_args(kinds[0]), None)
    return ()


_CHOICES = {name: found for name, kind in typing.get_type_hints(EngineConfig).items() if (found := choices_of(kind))}
