"""Every option of the engine, with the decisions that follow from them when nothing is given."""

import contextlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvern.errors import ConfigError
from kvern.io.bytecode import cache_home

DEFAULT_MODEL = "kvern-12m"
DEFAULT_ADAPTERS = 8
LARGEST_RANK = 128
LONGEST_SECONDS = 10_000_000
LONGEST_SILENCE = 60.0
"""Seconds that an engine may take for what it did not do before, if `engine_timeout` says nothing."""


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine; each is a flag, an environment variable and a configuration key of the same name."""

    model: str | None = None
    """Folder, Hugging Face id, or the name of an embedded model. None: the embedded chat model."""
    revision: str | None = None
    """Branch, tag or commit of the Hugging Face repository."""
    download_dir: str | None = None
    """Folder for what is downloaded from the Hugging Face hub. None: the hub's own cache, HF_HUB_CACHE."""
    tokenizer: str | None = None
    """Whose tokenizer and chat template to use: a folder, Hugging Face id, or embedded model. None: the model's."""
    chat_template: str | None = None
    """Jinja template in the place of the model's: a file, or the template itself."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """JSON object of names that the template sees, such as {"enable_thinking": false}; requests' own go before them."""
    hf_overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """JSON object whose values go before those of the model's config.json. Changed models are kept below cache_dir."""
    generation_config: str = "auto"
    """Where defaults of sampling come from: auto takes the model's, none no file's; else a folder with the file."""
    override_generation_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """JSON object whose values go before those: temperature, top_k, top_p, min_p, repetition_penalty, do_sample,
    eos_token_id."""
    dtype: Literal["auto", "bfloat16", "bf16", "float16", "fp16", "half", "float32", "fp32"] = "auto"
    """Number format of weights and activations; auto takes the checkpoint's."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto reads the safetensors files; dummy makes random weights from config.json, for benchmarks."""
    model_implementation: Literal["auto", "kvern", "transformers"] = "auto"
    """Whose code computes the model: kvern's, or, on a CPU, that of transformers, an extra, which is slower. auto takes
    kvern's if it knows the model's architecture."""
    quantization: Literal["fp8", "int8", "int4"] | None = None
    """What plain weights become while they are loaded: fp8 or int8, with a scale for each row, or int4, with one for 32
    inputs. None: what they are; weights that are stored quantized are recognised without it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes a GPU if there is one."""
    tensor_parallel_size: int = 1
    """Processes that compute the model together, each with a share of its weights and of its KV cache: one a GPU, or
    several of a CPU. One that waits for another for half of engine_timeout, or 30 s, gives up: a server then starts
    anew."""
    executor: Literal["processes", "ray"] = "processes"
    """Who starts the processes of engines and of their ranks: processes of this machine, or ray on nodes of the cluster
    that RAY_ADDRESS names, where each rank has a GPU, or as many processors as threads says."""
    enable_expert_parallel: bool = False
    """Place whole experts of a mixture on the ranks of tensor_parallel_size, instead of a part of each on all."""
    enable_dp_attention: bool = False
    """Each rank of tensor_parallel_size computes attention, and all else but experts, whole, for requests of its own,
    whose KV cache it has: data-parallel attention. Ranks share experts alone, for the rows of all."""
    redundant_experts: int = 0
    """Copies of busy experts, of each layer, beside all experts, where enable_expert_parallel places them."""
    rebalance_experts: str | None = None
    """Time such as 60s, after which experts that were placed whole change their places between steps, by what each has
    had to do, and again each time. None: they stay where they are."""
    pipeline_parallel_size: int = 1
    """Stages that have some of the model's layers each, one behind the other, and compute different steps at a time:
    tensor_parallel_size processes each."""
    threads: int | None = None
    """CPU threads for the model. None: OMP_NUM_THREADS, else the physical cores of one memory node that the process may
    use, and no more than its control group gives it the time of."""
    data_parallel_size: int = 1
    """Engines with a copy of the model each, behind one server: on a GPU each, or on a share of the processor's cores
    each. A request goes where most of its prompt is cached, or least waits."""
    max_model_len: int | None = None
    """Longest sequence in tokens, prompt and answer. None: the model's own context, as far as the memory reaches."""
    kv_cache: Literal["paged", "contiguous"] = "paged"
    """paged allocates blocks as sequences grow; contiguous reserves max_model_len for each running request."""
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8", "int8"] = "auto"
    """Number format of keys and values; auto takes the model's, but float32 for float16 on a CPU. fp8 (e4m3) and int8
    hold twice as many tokens, by scales that the checkpoint has or that are measured at the start."""
    kv_cache_tokens: int | None = None
    """Size of the KV cache in tokens. None: from the free memory and the batch that is possible."""
    gpu_memory_share: float | None = None
    """Share of the GPU's whole memory that this process may take, from 0 to 1, such as 0.4 where two servers share a
    card; without effect on a CPU. None: what is free."""
    block_size: int = 16
    """Tokens of one block of the paged cache."""
    prefix_cache: bool = True
    """Keep the keys and values of finished requests and reuse them for prompts that begin alike."""
    windowed_kv_cache: Literal["auto", "on", "off"] = "auto"
    """Give blocks of layers that see a window of keys back as it passes; auto: where it is possible."""
    batching: Literal["continuous", "static"] = "continuous"
    """continuous lets requests join and leave at every step; static runs a batch until its last request ends."""
    chunked_prefill: bool = True
    """Split long prompts over several steps, so that other requests go on meanwhile."""
    policy: Literal["fcfs", "priority", "sjf", "prefix"] = "fcfs"
    """Who is admitted first: first come, lowest priority number, shortest job, or longest cached prefix."""
    aging_steps: int = 1000
    """A request that has waited for this many steps goes before all that have not, whatever the policy."""
    max_batch_tokens: int | None = None
    """Tokens computed in one step at most. None: 1024 on a CPU, 8192 on a GPU."""
    target_itl: str | None = None
    """Time between the tokens of an answer that prompts beside it may cause, such as 15ms or 0.015s; none: any. Prompts
    are spread over as many steps as that takes. None: three times what a decode step takes, longer for prompts that
    have waited; any where nobody waits for single tokens, on a CPU, and with pipeline_parallel_size."""
    max_batch_requests: int | None = None
    """Requests that run at the same time at most. None: 256 on a CPU, 512 on a GPU. With enable_dp_attention each rank
    has so many."""
    attention_backend: Literal["auto", "triton", "flashinfer", "flash_attn", "torch_sdpa"] = "auto"
    """Who computes attention on a GPU; auto times those that are installed and remembers which was fastest."""
    linear_backend: Literal["auto", "cublas", "triton"] = "auto"
    """Who multiplies on a GPU; auto times both for each shape and batch size and remembers which was faster."""
    triton_kernels: bool = True
    """Use kvern's own kernels on a GPU; without them PyTorch does everything, slowly."""
    cpu_kernels: bool = True
    """Use kvern's own kernels on a CPU. A C++ compiler builds them in the background of the first start; PyTorch does
    everything until then, and without them."""
    cuda_graphs: bool = True
    """Launch a whole decode step at once on a GPU."""
    shared_prefix_attention: bool = True
    """Read the blocks that decoding requests begin with in common once for all of them, on a GPU."""
    proposer: str | None = None
    """Who guesses at tokens that one step then verifies: ngram looks for where the text reads the same, suffix also
    where other answers do, remote asks the server at draft_url; or an entry point of an installed package. None:
    nobody."""
    draft_url: str | None = None
    """Another server of OpenAI's API, with a smaller model: who proposer remote asks."""
    draft_as_text: bool = False
    """The model at draft_url has other tokens: it is asked by text and answers with text, without a temperature."""
    draft_model: str | None = None
    """A smaller model with the same vocabulary that guesses at tokens, or a draft head: a folder, Hugging Face id, or
    embedded model; mtp: the layer of the model's own checkpoint. None: the one that was made for an embedded model, or
    nobody."""
    draft_quantization: Literal["fp8", "int8", "int4"] | None = None
    """What plain weights of draft_model become while they are loaded, whatever the model's are, as by quantization."""
    speculation: Literal["auto", "off"] = "auto"
    """auto guesses as many tokens as are worth their time, where somebody guesses; off guesses none."""
    acceptance: Literal["coupled", "rejection"] = "coupled"
    """coupled accepts drafts that are drawn in their places, so that they change no token; rejection (Leviathan et al.
    2023) more of a draft model's or head's, and tokens then depend on drafts, though their probabilities do not."""
    kv_tier: str | None = None
    """Who keeps blocks that leave the KV cache: an entry point of an installed package. None: nobody."""
    grammar_backend: Literal["llguidance", "xgrammar"] = "llguidance"
    """Who follows the grammars of structured answers; xgrammar is an extra and does fewer forms."""
    logits_processors: tuple[str, ...] = ()
    """Custom logits processors that requests may use: entry points of installed packages, applied in this order."""
    overlap: bool = True
    """Prepare the next step while a GPU computes the present one."""
    deterministic: bool = False
    """Make a request's logits the same to the last bit whatever shares its batch. It costs speed on a GPU; on a CPU it
    takes kvern's kernels, which it waits for, and no adapters."""
    cache_dir: str | None = None
    """Folder for built kernels, measurements of this GPU, and models with changed files. None: kvern's among the user's
    caches."""
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
    """How the model writes calls of tools; auto reads it off the chat template, none leaves them in the text."""
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
    """How the model marks its thinking; auto reads it off the chat template, none leaves it in the text."""
    adapters: Mapping[str, str] = field(default_factory=dict, hash=False)
    """LoRA adapters by name, folders in PEFT's format: --adapter NAME=FOLDER, as often as there are adapters."""
    max_adapters: int | None = None
    """Adapters on the device at the same time; others wait in host memory. None: 8 if there are adapters, else 0."""
    max_adapter_rank: int = 64
    """Highest rank of an adapter, 128 at most; a GPU sets memory aside for it."""
    expert_counts: bool = False
    """Tell in /metrics how many tokens each expert of each layer has had; some models have thousands of experts."""
    seed: int = 0
    """Requests without a seed of their own draw theirs from this one."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model in the API of a server. None: the name it was started with."""
    engine_timeout: float | None = None
    """Seconds without a sign of life after which a server replaces the engine; a step takes less. None: 10, or what
    slow steps take, and a minute for what was not computed before."""

    def __post_init__(self) -> None:
        sizes = "max_model_len", "kv_cache_tokens", "block_size", "max_batch_requests"
        processes = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
        for name in ("threads", *processes, "aging_steps", *sizes):
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

    def _check_experts(self) -> None:
        """Raise ConfigError for ways to share experts that do not go together."""
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
    def target_itl_seconds(self) -> float | None:
        """The option in seconds; 0: there is no limit. None: it is not given."""
        return None if self.target_itl is None else read_seconds("target_itl", self.target_itl)

    @property
    def rebalance_seconds(self) -> float:
        """The option rebalance_experts in seconds; 0: experts stay where they are."""
        return read_seconds("rebalance_experts", self.rebalance_experts or "none")

    @property
    def has_drafts(self) -> bool:
        """Whether an option has somebody guess tokens."""
        return self.speculation != "off" and (self.proposer is not None or self.draft_model is not None)

    @property
    def ranks(self) -> int:
        """Processes that compute the model together: stage by stage, those of one stage behind one another."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def homes(self) -> int:
        """Ranks that have requests of their own, with rows and a KV cache for them; otherwise there is one for all."""
        return self.ranks if self.enable_dp_attention else 1

    @property
    def first_rank(self) -> int:
        """The rank that an engine's own process is: the first of the last stage, where tokens are sampled."""
        return self.ranks - self.tensor_parallel_size

    @property
    def rank_timeout(self) -> float:
        """Seconds for which one of several ranks waits for another, before the engine is given up for silent."""
        return self.longest_silence / 2

    @property
    def longest_silence(self) -> float:
        """Seconds for which an engine may give no sign of life, whatever it does."""
        return LONGEST_SILENCE if self.engine_timeout is None else self.engine_timeout

    @property
    def model_names(self) -> tuple[str, ...]:
        """By which a server's clients ask for the model; at least one."""
        return self.served_model_name or (self.model or DEFAULT_MODEL,)

    @property
    def cache_folder(self) -> Path:
        """Where builds, measurements and changed model folders are kept: the option, or kvern's among the caches."""
        if self.cache_dir is not None:
            return Path(self.cache_dir).expanduser()
        return cache_home()

    @property
    def adapter_places(self) -> int:
        """Adapters on the device at the same time; 0: there can be none."""
        if self.max_adapters is not None:
            return self.max_adapters
        return DEFAULT_ADAPTERS if self.adapters else 0


def read_seconds(name: str, text: str) -> float:
    """A time such as 15ms or 0.015s, in seconds; 0 and none are 0. Raises ConfigError."""
    text = str(text)  # Python code and files of options also give numbers, which have no unit
    number = 0.0 if text in ("none", "0") else -1.0
    for unit, factor in (("ms", 0.001), ("s", 1.0)):
        if number < 0 and text.endswith(unit):
            with contextlib.suppress(ValueError):
                number = float(text.removesuffix(unit)) * factor
    if not 0 <= number <= LONGEST_SECONDS:
        raise ConfigError(f"{name} is {text!r}: it must be a time like 15ms or 0.015s, or none")
    return number


def choices_of(kind: Any) -> tuple[str | None, ...]:
    """The values of an option that has a few, None among them where it may be left out; empty for other options."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    kinds = typing.get_args(kind)
    if len(kinds) == 2 and kinds[1] is type(None) and typing.get_origin(kinds[0]) is Literal:
        return (*typing.get_args(kinds[0]), None)
    return ()


_CHOICES = {name: found for name, kind in typing.get_type_hints(EngineConfig).items() if (found := choices_of(kind))}
