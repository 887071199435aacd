"""The plan of an engine, which all its ranks follow: decided from what each of them found on its device.

    Worker.probe --> ProbedDevice of each rank --agree-->   Plan     kernels, attention, sizes of the batch
    Worker.load  --> FreeMemory of each rank     --lay_out--> Layout   KV cache, who attends in which phase
    Worker.build

There are two rounds because weights come between them: kernels decide how weights are held, and what weights and
activations leave is the cache's. All of these are plain data that can be sent.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from kvern.cache.messages import WindowLimits
from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.spec.model import ModelSpec

logger = logging.getLogger("kvern")

REQUIRED_KERNELS = frozenset({"batch", "sampling"})
"""Without these the batch cannot live on the device, and PyTorch runs all steps."""
CPU_KERNELS = frozenset({"cpu_layers", "cpu_linear", "cpu_attention", "cpu_packed", "cpu_sampling"})
"""The groups of `kvern.cpu.check`, beside which PyTorch runs the step."""
RANK_KERNELS = frozenset({"cpu_ranks"})
"""The group that several ranks need besides."""
LARGEST_HEAD = 512
"""The largest head of the Triton attention: larger ones do not fit into registers."""
EIGHT_BIT = {"fp8": "float8_e4m3fn", "int8": "int8"}
"""The dtypes of a cache that has scales, by the name of the option."""
MOST_POSITIONS = 16
"""Blocks that are numbered for each that has memory."""
MOST_CHUNKS = 64
"""The most pieces in which the memory of a KV cache is taken and given back, if they are not to be smaller."""
MOST_SMALL_CHUNKS = 256
"""The most pieces on a GPU, where a model's own part of the memory has `OWN_CHUNKS` at least."""
OWN_CHUNKS = 16
BATCH_REQUESTS = {"cpu": 256, "cuda": 512}
BATCH_TOKENS = {"cpu": 1024, "cuda": 8192}


class ProbedDevice(msgspec.Struct, frozen=True):
    """One rank's device before weights are on it: its type, the groups of kernels that work, and the GPU's UUID.

    `dtype` is the name of the model's in PyTorch, which the checkpoint may have decided. `draft_kernels` are those that
    work with what a draft model is made of, too; None: this rank has none.
    """

    device: str
    dtype: str
    kernels: frozenset[str] = frozenset()
    gpu: str | None = None
    draft_kernels: frozenset[str] | None = None


class Plan(msgspec.Struct, frozen=True):
    """The decisions that hold for every rank."""

    device: str
    dtype: str
    cache_dtype: str
    plain_cache_dtype: str
    """The dtype of a cache for which no other was asked."""
    kernels: frozenset[str]
    linear_backend: Literal["auto", "cublas", "triton"]
    attention_backend: str
    max_model_len: int
    max_batch_requests: int
    max_batch_tokens: int
    gpus: tuple[str, ...]
    draft_kernels: frozenset[str] = frozenset()

    @property
    def on_device(self) -> bool:
        """The batch lives on the device, and Triton's kernels run its steps; else PyTorch does, beside a CPU's."""
        return self.kernels >= REQUIRED_KERNELS

    def of_draft(self, spec: ModelSpec) -> "Plan":
        """The plan of a draft model, with which other kernels may work."""
        kernels = self.kernels & self.draft_kernels
        attends = "attention" in kernels and largest_head(spec) <= LARGEST_HEAD
        return msgspec.structs.replace(
            self,
            kernels=kernels,
            linear_backend=self.linear_backend if "linear" in kernels else "cublas",
            attention_backend=self.attention_backend if attends else "torch_sdpa",
        )


class ChangingCache(msgspec.Struct, frozen=True):
    """The bounds of a KV cache on a GPU whose memory changes while the engine runs.

    unit         blocks that have memory of their own at least
    fixed_bytes  what the engine takes of the card beside its cache
    own_bytes    what its share of the card leaves for the cache: one sequence must fit
    most_bytes   what the whole card would leave
    """

    unit: int
    fixed_bytes: int
    own_bytes: int
    most_bytes: int


class CacheChunks(msgspec.Struct, frozen=True):
    """A cache that changes while the engine runs: the memory of `blocks` blocks is taken and given back at once.

    `unit`, `fixed_bytes`: as of a GPU's `ChangingCache`, with the bytes of states; 0: it is in a CPU's memory.
    `own`: the blocks within the engine's share of its GPU.
    """

    blocks: int
    unit: int = 0
    fixed_bytes: int = 0
    own: int = 0


class FreeMemory(msgspec.Struct, frozen=True):
    """The memory that one rank has left for keys and values, of which a token takes `token_bytes` over all layers.

    States of recurrent layers are to be had there, too: a request's take `state_bytes`.
    `attention`: by phase, the library that it found to be fastest, of the `libraries` that work there. `scales`: a
    digest of those of a cache in 8 bits. `window`: of layers that have `window_tables` block tables of their own;
    `whole`: whether there are others, which keep all tokens.
    `most_drafts`: of a request in a step, by who guesses on the device; None: it makes any number. `catches_up`: that
    one has to compute a text before it guesses how it goes on. `changing`: None: the cache keeps its size, or is in a
    CPU's memory.
    """

    cache_bytes: int
    token_bytes: int
    attention: dict[str, str] = {}
    libraries: frozenset[str] = frozenset()
    scales: str = ""
    state_bytes: int = 0
    window: int = 0
    window_tables: int = 0
    whole: bool = True
    most_drafts: int | None = None
    catches_up: bool = True
    changing: ChangingCache | None = None

    @property
    def blocks_of_column(self) -> int:
        return self.whole + self.window_tables


class Layout(msgspec.Struct, frozen=True):
    """The KV cache of `blocks` of `block_size` tokens, and how large a step may be.

    A token of which all layers keep something takes `token_bytes`: of one block, or of one in each block table, where
    layers with a `window` have `window_tables` of their own.
    `depth`: how many steps are in flight at most; `attention`: who attends in which phase. `scales`: digests, of all
    ranks, of those of a cache in 8 bits. `states`: places for those of recurrent layers; 0: the model has none.
    `positions`: as of `WindowLimits`.
    `most_drafts`, `catches_up`: as of a `FreeMemory`. `kernels`: as of a `Plan`.
    `chunks`: None: all memory is taken at the start.
    """

    max_model_len: int
    blocks: int
    block_size: int
    token_bytes: int
    dtype: str
    max_batch_requests: int
    max_batch_tokens: int
    depth: int
    attention: dict[str, str]
    device: str
    gpus: tuple[str, ...]
    scales: str = ""
    states: int = 0
    window: int = 0
    window_tables: int = 0
    positions: int = 0
    most_drafts: int | None = None
    catches_up: bool = True
    kernels: frozenset[str] = frozenset()
    chunks: CacheChunks | None = None

    @property
    def chunk(self) -> int:
        """The blocks of a chunk; 0: the cache keeps its size."""
        return 0 if self.chunks is None else self.chunks.blocks

    @property
    def unit(self) -> int:
        """The blocks that have memory of their own at least, of a GPU's cache that changes; 0: it is no such one."""
        return 0 if self.chunks is None else self.chunks.unit

    @property
    def chunk_bytes(self) -> int:
        """The bytes of a chunk."""
        return self.chunk * self.block_size * self.token_bytes

    @property
    def certain_bytes(self) -> int:
        """The bytes that the engine always takes of its GPU; 0: its cache does not change, or is in a CPU's memory."""
        if self.chunks is None or not self.unit:
            return 0
        return self.chunks.fixed_bytes + self.least_chunks * self.chunk_bytes

    @property
    def most_chunks(self) -> int:
        """The chunks of the largest cache; 0: the cache keeps its size."""
        return -(-self.blocks // self.chunk) if self.chunk else 0

    @property
    def own_chunks(self) -> int:
        """The chunks of a model that shares memory with no other: on a GPU those within its share."""
        if self.chunks is None or not self.unit:
            return self.most_chunks
        return min(max(self.least_chunks, self.chunks.own // self.chunk), self.most_chunks)

    @property
    def least_chunks(self) -> int:
        """The chunks that hold one sequence of `max_model_len`; all of them where layers have windows."""
        if self.window_tables:
            return self.most_chunks
        return math.ceil(math.ceil(self.max_model_len / self.block_size) / self.chunk)

    @property
    def least_blocks(self) -> int:
        """The blocks that have memory at the start, on a CPU once they are used."""
        return min(self.least_chunks * self.chunk, self.blocks) if self.unit else self.blocks

    @property
    def cached_tokens(self) -> int:
        """The most tokens that a prefix cache keeps."""
        columns = (self.positions == 0) + self.window_tables  # blocks that a token takes
        return self.blocks * self.block_size // columns


def agree(findings: Sequence[ProbedDevice], config: EngineConfig, spec: ModelSpec) -> Plan:
    """Find the plan that all ranks can follow. Raises ConfigError for a `max_model_len` above the model's."""
    first = findings[0]
    kernels = frozenset.intersection(*(item.kernels for item in findings))
    drafting = kernels.intersection(*(item.draft_kernels for item in findings if item.draft_kernels is not None))
    if not drafting >= REQUIRED_KERNELS:
        kernels &= CPU_KERNELS | RANK_KERNELS
    attention: str = config.attention_backend
    largest = largest_head(spec)
    if attention == "auto" and ("attention" not in kernels or largest > LARGEST_HEAD):
        attention = "torch_sdpa"
    cache_dtype: str = EIGHT_BIT.get(config.kv_cache_dtype, config.kv_cache_dtype)
    plain = "float32" if first.device == "cpu" and first.dtype == "float16" else first.dtype
    if cache_dtype == "auto":
        cache_dtype = plain
    longest = resolve_max_model_len(config, spec)
    default = BATCH_REQUESTS[first.device]
    requests = config.max_batch_requests or min(default, config.max_batch_tokens or default)
    return Plan(
        device=first.device,
        dtype=first.dtype,
        cache_dtype=cache_dtype,
        plain_cache_dtype=plain,
        kernels=kernels,
        linear_backend=config.linear_backend if "linear" in kernels else "cublas",
        attention_backend=attention,
        max_model_len=longest,
        max_batch_requests=requests,
        max_batch_tokens=_batch_tokens(config, first.device, requests, longest),
        gpus=tuple(item.gpu for item in findings if item.gpu is not None),
        draft_kernels=drafting,
    )


def largest_head(spec: ModelSpec) -> int:
    """Entries of the largest head that is attended to as `LARGEST_HEAD` says; latents are in another way."""
    return max((item.head_dim for item in spec.attentions if item.value_dim is None), default=0)


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """The longest sequence: the option, which the model's own context bounds, or what is usual. Raises ConfigError."""
    if config.max_model_len is not None and config.max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, above the model's {spec.max_position_embeddings}: lower it"
        )
    usual = None if spec.encoder is None else spec.encoder.usual_len
    return config.max_model_len or min(usual or spec.max_position_embeddings, spec.max_position_embeddings)


def whole_prompt(config: EngineConfig, spec: ModelSpec) -> int:
    """The most tokens of a prompt that one step computes whole; 0: prompts are computed in chunks."""
    return 0 if config.chunked_prefill else resolve_max_model_len(config, spec)


def lay_out(rooms: Sequence[FreeMemory], plan: Plan, config: EngineConfig) -> Layout:
    """Size the KV cache: what the batch can use, as far as the memory of the fullest rank goes beside its states.

    Raises ConfigError when the memory, or `kv_cache_tokens`, cannot hold one sequence of `max_model_len`.
    """
    longest = plan.max_model_len
    token_bytes = max(room.token_bytes for room in rooms)
    room = rooms[0]
    states_each = states_of_a_request(config)
    requests, tokens = running_requests(rooms, plan, config), config.kv_cache_tokens
    state_bytes = requests * states_each * max(room.state_bytes for room in rooms)
    if state_bytes > (most := min(room.cache_bytes for room in rooms)):
        raise ConfigError(
            f"the states of {requests} requests take {state_bytes / 2**20:.0f} MiB, and the cache's memory is "
            f"{most / 2**20:.0f} MiB: lower max_batch_requests{', or leave prefix_cache off' * config.prefix_cache}"
        )
    changing = _changing(rooms, longest * requests, state_bytes, config)
    if changing is not None:
        tokens = changing.blocks * config.block_size
    elif tokens is None:
        room_for = min((room.cache_bytes - state_bytes) // room.token_bytes for room in rooms)
        tokens = min(longest * requests, max(room_for, 0))
    reach = longest_fitting(tokens, room, plan, config) if changing is None else changing.own_tokens
    if 0 < reach < longest and config.max_model_len is None:
        logger.warning("max_model_len is %d, not the model's %d: the KV cache has no room for more", reach, longest)
        longest = reach
    paged = config.kv_cache == "paged"
    block_size = config.block_size if paged else longest
    blocks = -(-tokens // block_size) * room.blocks_of_column if paged else tokens // max(block_size, 1)
    if reach < longest or not blocks:
        raise ConfigError(
            f"the KV cache has room for {reach} tokens ({min(tokens, reach) * token_bytes / 2**20:.0f} MiB), below "
            f"max_model_len {longest}: raise kv_cache_tokens or gpu_memory_share, free memory, or lower max_model_len"
        )
    requests = requests if paged else min(requests, blocks)
    return Layout(
        max_model_len=longest,
        blocks=blocks,
        block_size=block_size,
        token_bytes=token_bytes,
        dtype=plan.cache_dtype,
        max_batch_requests=requests,
        max_batch_tokens=_batch_tokens(config, plan.device, requests, longest),
        depth=_depth(plan, config),
        attention=_agreed_attention(rooms),
        device=plan.device,
        gpus=plan.gpus,
        scales="".join(room.scales for room in rooms),
        states=requests * states_each if any(room.state_bytes for room in rooms) else 0,
        window=room.window,
        window_tables=room.window_tables,
        positions=0 if room.whole else _positions(blocks, -(-longest // block_size), longest / room.window),
        most_drafts=room.most_drafts,
        catches_up=room.catches_up,
        kernels=plan.kernels,
        chunks=_chunks(blocks, plan, config) if changing is None else changing.chunks,
    )


def is_elastic(config: EngineConfig) -> bool:
    """True if the memory of the KV cache changes while the engine runs, on a GPU if its tokens have one block table."""
    return config.elastic_kv_cache and config.kv_cache == "paged" and not config.enable_dp_attention


class _Changing(NamedTuple):
    """The sizes in blocks of a GPU's cache that changes; `own_tokens`: those for which it always has memory."""

    blocks: int
    own_tokens: int
    chunks: CacheChunks


def _chunks(blocks: int, plan: Plan, config: EngineConfig) -> CacheChunks | None:
    """The chunks of a cache in a CPU's memory; None: all of it is taken at the start."""
    return CacheChunks(-(-blocks // MOST_CHUNKS)) if plan.device == "cpu" and is_elastic(config) else None


def _changing(rooms: Sequence[FreeMemory], usable: int, state_bytes: int, config: EngineConfig) -> _Changing | None:
    """Size a GPU's cache that changes, of at most `usable` tokens; None: it does not, or is in a CPU's memory."""
    found = [(room, room.changing) for room in rooms if room.changing is not None]
    if not found:
        return None
    unit, size = max(each.unit for _, each in found), config.block_size
    own = min(max(0, each.own_bytes - state_bytes) // (size * room.token_bytes) for room, each in found)
    most = min(max(0, each.most_bytes - state_bytes) // (size * room.token_bytes) for room, each in found)
    wanted = config.kv_cache_tokens or usable
    blocks = min(-(-wanted // size), most)
    chunk = max(unit, min(-(-blocks // MOST_CHUNKS), own // OWN_CHUNKS) // unit * unit)
    certain = own if config.max_model_len else own // chunk * chunk
    blocks = min(-(-blocks // unit) * unit, MOST_SMALL_CHUNKS * chunk)
    fixed = max(each.fixed_bytes for _, each in found)
    return _Changing(blocks, min(certain * size, wanted), CacheChunks(chunk, unit, fixed + state_bytes, own))


def _depth(plan: Plan, config: EngineConfig) -> int:
    """Steps in flight: one in each stage; else the host's work on one beside the device's on another."""
    if config.pipeline_parallel_size > 1:
        return config.pipeline_parallel_size
    return 2 if plan.on_device and config.overlap else 1


def longest_fitting(tokens: int, room: FreeMemory, plan: Plan, config: EngineConfig) -> int:
    """The longest sequence that fits into the memory of so many tokens of which all layers keep something."""
    held = _held_in_windows(room, plan, config)
    if tokens <= held:
        return tokens
    return tokens + (tokens - held) * room.window_tables if room.whole else max(tokens, plan.max_model_len)


def sequences_taken(count: int, length: int, room: FreeMemory, plan: Plan, config: EngineConfig) -> int:
    """The memory of so many sequences of this length, as a number of tokens that all layers keep.

    One of them is at its prompt, where it holds most; the others decode.
    """
    tables, most = room.window_tables, min(length, _held_in_windows(room, plan, config))
    decoding = min(length, room.window + 2 * config.block_size) if tables else 0
    blocks = count * length * room.whole + (most + (count - 1) * decoding) * tables
    return -(-blocks // room.blocks_of_column)


def _held_in_windows(room: FreeMemory, plan: Plan, config: EngineConfig) -> int:
    limits = WindowLimits(room.window, room.window_tables, plan.max_batch_tokens)
    return limits.held_tokens + 3 * config.block_size  # parts of blocks at the ends


def _positions(blocks: int, longest: int, windows: float) -> int:
    """Returns how many blocks are numbered for sequences and nodes that have memory for windows alone.

    What has memory reaches as far as the longest sequence has windows; but nodes take the host's memory.
    """
    return max(longest, int(blocks * min(max(windows, 1), MOST_POSITIONS)))


def states_of_a_request(config: EngineConfig) -> int:
    """For how many states there are places for each that runs: as many as these have may be kept for others."""
    return 2 if config.prefix_cache else 1


def running_requests(rooms: Sequence[FreeMemory], plan: Plan, config: EngineConfig) -> int:
    """The requests that run at a time; by default their states take half of the cache's memory at most."""
    if config.max_batch_requests:
        return plan.max_batch_requests
    each = states_of_a_request(config)
    fitting = [room.cache_bytes // 2 // (each * room.state_bytes) for room in rooms if room.state_bytes]
    return max(1, min([plan.max_batch_requests, *fitting]))


def _batch_tokens(config: EngineConfig, device: str, requests: int, longest: int) -> int:
    """Tokens of one step at most: a token of each request must fit, and a whole prompt if it cannot be split."""
    tokens = max(config.max_batch_tokens or BATCH_TOKENS[device], requests)
    return tokens if config.chunked_prefill else max(tokens, longest)


def _agreed_attention(rooms: Sequence[FreeMemory]) -> dict[str, str]:
    """The first rank's choice; kvern's own kernels in a phase whose library does not work on every rank."""
    everywhere: frozenset[str] = frozenset.intersection(*(room.libraries for room in rooms))
    chosen: Mapping[str, str] = rooms[0].attention
    return {phase: name if name in everywhere else "triton" for phase, name in chosen.items()}
