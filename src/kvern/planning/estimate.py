"""Estimates of a model divided among cards: memory in bytes, and seconds.

  decode step = reading weights, computing products: the longer, and a part of the shorter
                + keys and values read / bandwidth + what each product takes besides + all-reduces
  prompts     = products + attention + states + all-reduces, or a share of them where they overlap with products
  products    = operations / rate + their inputs and outputs, read and written / bandwidth

Pipeline stages are assumed to be equal. Each computes a share of the requests at a time, so the decode of one takes the
time of a whole model with that share, and of the transfers between stages.

What steps reach of a card was measured on an H200 (docs/PERFORMANCE.md), and `benchmarks/planned.py` has all records
beside plans. CPUs are measured; they overlap all that they read with what they compute.
"""

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import torch

from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.io.files import as_size
from kvern.layers.block import adds_by_norms
from kvern.layers.halves import least_rows
from kvern.layers.linear_format import LinearMethods
from kvern.layers.unquantized import Unquantized
from kvern.models.precision import SMALL, Share
from kvern.models.share import WholeExperts, share_of
from kvern.models.stages import check_stages
from kvern.planning.hardware import NVLINK, Card
from kvern.runner.memory import GPU_MEMORY_SHARE, MARGIN_BYTES, bytes_of_state, bytes_of_token, host_cache_bytes
from kvern.runner.plan import BATCH_REQUESTS, BATCH_TOKENS, states_of_a_request
from kvern.runner.ranks.rank_limits import check_share
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import MlpSpec, ModelSpec, MoeSpec

LEAST_OUTPUTS = 8
"""The least outputs of an expert's matrix; an expert with fewer numbers than these have is a bias."""
PLAIN = "bfloat16", "float16", "float32"
"""Formats of weights that are not quantized."""
WHOLE = (SMALL, "routers", "indexer", "attention queries, latents", "residual streams", "inputs of each layer")
"""Kinds of layers that every rank has completely."""
HEAD = "output layer", "embeddings"
"""Kinds of weights with which only rows that are sampled are multiplied."""
STATE_TOKENS = 32
"""Tokens of a prompt that change states in the time that those of one decode take to be read and written."""
HALVED = "attention q, k, v", "attention out", "MLP gate, up", "MLP down"
"""Kinds of layers that steps in two parts compute for one part while rows of the other are all-reduced."""
ROW_BITS = 20
"""Numbers of rows that `StepFactors` tell apart, by their length in bits."""
EXPOSED = 0.25
"""The share of these all-reduces that does not overlap with products: two of eight transfers of a layer."""


@dataclass(frozen=True)
class Model:
    """The properties of a model that its cost depends on. `dtype` is of activations; `linear` says how weights are
    stored."""

    spec: ModelSpec
    dtype: str
    shares: Sequence[Share]
    linear: LinearMethods = LinearMethods(Unquantized())

    _key_parts: dict[tuple[int, bool], float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The part of keys and values on each rank, by the number of ranks and whether experts are whole."""

    @cached_property
    def experts(self) -> MoeSpec | None:
        return next((layer.mlp for layer in self.spec.layers if isinstance(layer.mlp, MoeSpec)), None)

    @property
    def token_bytes(self) -> int:
        """The bytes of keys and values of a token in all layers."""
        return bytes_of_token(self.spec, getattr(torch, self.dtype))

    @property
    def state_bytes(self) -> int:
        """The bytes of a request's states in all layers."""
        return bytes_of_state(self.spec, getattr(torch, self.dtype))

    def touched(self, share: Share, rows: int) -> float:
        """Returns the part of these weights that a step of so many rows reads."""
        if share.kind == "embeddings" and not self.spec.tie_word_embeddings:
            return 0.0
        if share.kind == "experts" and self.experts is not None:
            return 1 - (1 - self.experts.top_k / self.experts.experts) ** rows
        return 1.0

    def operations(self, share: Share) -> float:
        """Returns the operations of one row in the products with these weights."""
        used = self.experts.top_k / self.experts.experts if share.kind == "experts" and self.experts else 1.0
        return 0.0 if share.kind == "embeddings" and not self.spec.tie_word_embeddings else 2 * share.parameters * used

    def products(self, share: Share) -> int:
        """Returns the products of a step with these weights, which are none for norms and biases."""
        each = share.parameters / share.matrices / self._of_experts(share)[0]
        is_bias = share.kind == "experts" and each < LEAST_OUTPUTS * self.spec.hidden_size
        return 0 if share.kind == SMALL or is_bias or not self.touched(share, 1) else share.matrices

    def passed(self, share: Share) -> float:
        """Returns the numbers of inputs and outputs of one row in these products, as if they were square."""
        every, used = self._of_experts(share)
        return 2 * used * math.sqrt(share.parameters * self.products(share) / every)

    def _of_experts(self, share: Share) -> tuple[int, int]:
        moe = self.experts if share.kind == "experts" else None
        return (moe.experts, moe.top_k) if moe else (1, 1)


@dataclass(frozen=True)
class Workload:
    """Concurrent requests, with the lengths of their prompts and answers in tokens."""

    requests: int = 64
    input: int = 1024
    output: int = 256


@dataclass(frozen=True)
class Split:
    """`data` replicas of the model, each of `pipeline` stages with tensor parallelism over `tensor` cards.

    The cards of a stage have parts of every expert, or `whole_experts`.
    """

    tensor: int
    data: int
    pipeline: int = 1
    whole_experts: bool = False

    def __str__(self) -> str:
        stages = f"pipeline {self.pipeline} x " if self.pipeline > 1 else ""
        return f"tensor {self.tensor} x {stages}data {self.data}{', whole experts' * self.whole_experts}"

    @property
    def placing(self) -> WholeExperts | None:
        """The placement of experts on the cards of a stage, for `share_of`."""
        return WholeExperts() if self.whole_experts else None

    @property
    def options(self) -> dict[str, int | bool]:
        """The options of `EngineConfig`."""
        return {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "data_parallel_size": self.data,
            "enable_expert_parallel": self.whole_experts,
        }

    @property
    def cards(self) -> int:
        """The cards of a replica."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class Estimate:
    """The memory and speed of a split on each card.

    `weights`, `token_bytes`: bytes of a card. `cache_tokens`: tokens that fit in a replica's cache. `batch`: requests
    that decode at a time in a replica. Seconds: `decode_one` and `decode` of a step with one request and with the
    batch, `first_token` of a prompt alone. `rate`: generated tokens per second of all replicas under the workload.
    `lacks`: why the split cannot run; empty if it can.
    """

    split: Split
    weights: float
    token_bytes: float
    cache_tokens: int
    batch: int
    decode_one: float
    decode: float
    first_token: float
    rate: float
    lacks: str = ""


@dataclass(frozen=True)
class StepFactors:
    """Seconds of the parts of steps. `weights`: of reading them, by the length in bits of the number of rows; `read`:
    the share of the card's bandwidth that each assumes.

    `row`: of the products of a row; `head`: of those of a decode besides; `pair`: of the attention of a prompt's token
    to a key; `keys`: of reading what a decode attends to, for each window (0: none) by key; `state`: of what a decode
    reads and writes besides; `sums` and `sum_row`: of transfers between cards, in each step and for each row;
    `overhead`: in each step. `keys_read` and `computed`: the shares of the card's bandwidth and rate that they assume
    for keys and products. `late`: the share of the shorter of weights and products that does not overlap with the
    longer.
    """

    weights: Sequence[float]
    row: float
    pair: float
    keys: Sequence[tuple[int, float]]
    state: float
    sums: float
    sum_row: float
    overhead: float
    card: Card
    read: Sequence[float] = (1.0,)
    keys_read: float = 1.0
    computed: float = 1.0
    late: float = 0.0
    head: float = 0.0
    bounds: "PartBounds | None" = None


PARTS_OF_STEPS = {
    "attention": "attention",
    "indexer": "attention",
    "delta net": "recurrent",
    "Mamba": "recurrent",
    "short convolution": "recurrent",
    "MLP": "mlp",
    "experts": "experts",
    "routers": "experts",
    "shared expert": "experts",
    "output layer": "head",
    "embeddings": "head",
}
"""The parts of steps that read weights, by the beginnings of their kinds; embeddings may be the head, too."""


MOST_KNOWN = 1024
"""Numbers of rows whose bounds are kept."""


@dataclass(frozen=True)
class PartBounds:
    """The least seconds of the parts of steps: with all of a card's bandwidth, or all of its rate.

    `token_bytes`: of keys and values of a token on each card.
    """

    model: Model
    card: Card
    split: Split
    token_bytes: float

    _known: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict, repr=False, compare=False)
    """The bounds without keys, by numbers of rows, of all rows and of those of the head."""

    def least(self, rows: int, prompt: int, keys: int, pairs: float) -> dict[str, float]:
        """Returns the bounds of the parts that have one, of a step as `StepLoad` describes it."""
        sizes = rows, max(rows - prompt, 1)
        if sizes not in self._known:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            self._known[sizes] = self._without_keys(*sizes)
        found = self._known[sizes].copy()
        for part, window, of_key, of_pair in self._attended:
            seen = min(keys, (rows - prompt) * window) if window else keys
            found[part] = found.get(part, 0.0) + of_key * seen + of_pair * pairs
        return found

    def _without_keys(self, rows: int, sampled: int) -> dict[str, float]:
        model = self.model
        split = self.split
        card = self.card
        reading: dict[str, float] = {}
        computing: dict[str, float] = {}
        for share in model.shares:
            part = next((name for kind, name in PARTS_OF_STEPS.items() if share.kind.startswith(kind)), None)
            if part is None or (share.kind.startswith("embeddings") and share.kind != "embeddings"):
                continue
            count = sampled if part == "head" else rows
            read = _read_part(model, share, split, count) * share.nbytes
            computed = _computed_part(model, share, split, count) * count * model.operations(share)
            reading[part] = reading.get(part, 0.0) + read / card.bandwidth
            computing[part] = computing.get(part, 0.0) + computed / _rate(card, share)
        found = {part: max(seconds, computing[part]) for part, seconds in reading.items()}
        weights, attentions = found.pop("attention", 0.0), model.spec.attentions
        for item in attentions:
            part = "window" if item.window else "attention"
            found[part] = found.get(part, 0.0) + weights / len(attentions)
        if split.tensor > 1:
            found["collectives"] = _all_reduced(model, card, split, rows)
        return {part: seconds for part, seconds in found.items() if seconds}

    @cached_property
    def _attended(self) -> list[tuple[str, int, float, float]]:
        """For each window the part, the window, 0 for none, and the seconds of a key and of a pair."""
        sums: dict[int, tuple[float, float]] = {}
        for item in self.model.spec.attentions:
            numbers, products = sums.get(item.window or 0, (0.0, 0.0))
            numbers += item.stored * item.kv_heads * item.head_dim
            sums[item.window or 0] = numbers, products + 4 * item.heads * item.head_dim
        each = self.token_bytes / (sum(numbers for numbers, _ in sums.values()) or 1.0) / self.card.bandwidth
        rate = self.split.tensor * self.card.rate
        return [
            ("window" if window else "attention", window, each * numbers, products / rate)
            for window, (numbers, products) in sums.items()
        ]


def splits(cards: int, model: Model) -> Iterator[Split]:
    """Yields all ways to divide a model among all cards that kvern supports."""
    for tensor, pipeline in product(range(1, cards + 1), repeat=2):
        if cards % (tensor * pipeline):
            continue
        for whole_experts in (False, True)[: 1 + (tensor > 1)]:
            split = Split(tensor, cards // (tensor * pipeline), pipeline, whole_experts)
            with contextlib.suppress(ConfigError):
                check_share(model.spec, tensor, model.linear, split.placing)
                if pipeline > 1:
                    check_stages(model.spec, pipeline)
                yield split


def estimate(model: Model, card: Card, split: Split, workload: Workload) -> Estimate:
    """Estimates a split on cards like this one."""
    weights = _weights(model, split)
    token_bytes = model.token_bytes * _part_of_keys(model, split) / split.pipeline
    state_bytes = model.state_bytes / split.cards
    left = card.memory - weights
    if card.host:
        room = float(host_cache_bytes(max(int(left), 0), int(token_bytes), int(state_bytes)))
    else:
        room = max((left - MARGIN_BYTES) * GPU_MEMORY_SHARE, 0.0)
    longest = workload.input + workload.output
    each = longest * token_bytes + states_of_a_request(EngineConfig()) * state_bytes
    cache_tokens = int(room / token_bytes) if token_bytes else 0
    wanted = -(-workload.requests // split.data)
    batch = min(wanted, BATCH_REQUESTS["cpu" if card.host else "cuda"], int(room / each))
    lacks = ""
    if left <= 0:
        lacks = f"weights of {as_size(int(weights))} are more than a card's {as_size(int(card.memory))}"
    elif batch < 1:
        lacks = f"beside weights of {as_size(int(weights))} there is no room for a sequence of {longest:,} tokens"
    stages, middle = min(split.pipeline, max(batch, 1)), workload.input + workload.output // 2
    decode = decode_seconds(model, card, split, max(-(-batch // stages), 1), middle)
    served = min(workload.requests, split.data * batch)
    prompt = prompt_seconds(model, card, split, workload.input, BATCH_TOKENS["cuda"])
    alone = prompt_seconds(model, card, split, workload.input, workload.input)
    return Estimate(
        split=split,
        weights=weights,
        token_bytes=token_bytes,
        cache_tokens=cache_tokens,
        batch=batch,
        decode_one=decode_seconds(model, card, split, 1, middle),
        decode=decode,
        first_token=max(alone, decode_seconds(model, card, split, 1, 1)),
        rate=0.0 if lacks else served * workload.output / (batch * prompt / stages + workload.output * decode),
        lacks=lacks,
    )


def step_factors(model: Model, card: Card, split: Split, token_bytes: float) -> StepFactors:
    """Returns the factors of an engine's steps; `token_bytes`: of keys and values of a token on each card."""
    keys: dict[int, float] = {}
    for item in model.spec.attentions:
        keys[item.window or 0] = keys.get(item.window or 0, 0.0) + item.stored * item.kv_heads * item.head_dim
    bandwidth = card.reached.keys * card.bandwidth
    each = token_bytes / (sum(keys.values()) or 1.0) / bandwidth
    pair = sum(4 * item.heads * item.head_dim for item in model.spec.attentions)
    typical = BATCH_REQUESTS["cuda"]
    sums = _moved(model, card, split, 0)
    row = _product_seconds(model, card, split, typical, 0) / typical
    head = _product_seconds(model, card, split, typical, typical) / typical - row
    state = 2 * model.state_bytes / split.cards / bandwidth
    row += state / STATE_TOKENS
    numbers = [max(3 << bits >> 2, 1) for bits in range(ROW_BITS)]
    weights = [_weight_seconds(model, card, split, rows) for rows in numbers]
    least = [
        sum(_read_part(model, share, split, rows) * share.nbytes for share in model.shares) / card.bandwidth
        for rows in numbers
    ]
    computed = sum(
        _computed_part(model, share, split, typical) * model.operations(share) / _rate(card, share)
        for share in model.shares
    )
    return StepFactors(
        weights=weights,
        row=row,
        pair=pair / (split.tensor * card.reached.attended * card.rate),
        keys=[(window, numbers * each) for window, numbers in keys.items()],
        state=state,
        sums=sums,
        sum_row=_moved(model, card, split, 1) - sums,
        overhead=_overhead(model, card),
        card=card,
        read=[fastest / seconds for fastest, seconds in zip(least, weights, strict=True)],
        keys_read=card.reached.keys,
        computed=computed / (row + head),
        late=card.reached.late,
        head=head,
        bounds=PartBounds(model, card, split, token_bytes),
    )


def seconds_of(model: Model, card: Card, split: Split, requests: Sequence[tuple[int, int]], batch: int) -> float:
    """Returns the seconds of requests that arrive together at one replica, `batch` of which run at a time.

    `requests` are lengths of prompts and answers in tokens. Steps get shorter as answers end; the longest answer
    decides the end.
    """
    waiting, seconds = deque(requests), 0.0
    running: list[tuple[int, int]] = []  # the final length of each, and the tokens still to generate
    while waiting or running:
        while waiting and len(running) < batch:
            prompt, answer = waiting.popleft()
            seconds += prompt_seconds(model, card, split, prompt, BATCH_TOKENS["cuda"]) / min(split.pipeline, batch)
            running.append((prompt + answer, answer))
        steps = min(lacking for _, lacking in running)
        middle = sum(end - lacking for end, lacking in running) // len(running) + steps // 2
        rows = -(-len(running) // min(split.pipeline, len(running)))
        seconds += steps * decode_seconds(model, card, split, rows, middle)
        running = [(end, lacking - steps) for end, lacking in running if lacking > steps]
    return seconds


def _weights(model: Model, split: Split) -> float:
    """Returns the bytes on the fullest card: the first of several stages also has the embeddings."""
    bytes_of = {share: _part(model, share, split) * share.nbytes for share in model.shares}
    if split.pipeline == 1:
        return sum(bytes_of.values())
    embeddings = sum(size for share, size in bytes_of.items() if share.kind == "embeddings")
    read = sum(bytes_of.values()) - (0 if model.spec.tie_word_embeddings else embeddings)
    return read / split.pipeline + embeddings


def _placed(model: Model, share: Share, split: Split) -> MoeSpec | None:
    """Returns the mixture of these experts if each rank has whole experts; None if it has a part of each matrix, or
    all."""
    return model.experts if share.kind == "experts" and split.whole_experts else None


def _part(model: Model, share: Share, split: Split) -> float:
    """Returns the largest part of these weights on one rank."""
    if (moe := _placed(model, share, split)) is not None:
        return -(-moe.experts // split.tensor) / moe.experts
    return 1.0 if share.kind in WHOLE else 1 / split.tensor


def _read_part(model: Model, share: Share, split: Split, rows: int) -> float:
    """Returns the largest part of these weights that a step of so many rows reads on one rank."""
    touched, part = model.touched(share, rows), _part(model, share, split)
    if (moe := _placed(model, share, split)) is None:
        return part * touched
    return min(part, _busiest(touched * moe.experts, split) / moe.experts)


def _computed_part(model: Model, share: Share, split: Split, rows: int) -> float:
    """Returns the largest part of the products of so many rows with these weights on one rank."""
    if (moe := _placed(model, share, split)) is None:
        return _part(model, share, split)
    pairs = rows * moe.top_k
    return _busiest(pairs, split) / pairs


def _busiest(count: float, split: Split) -> float:
    """Estimates the largest number on one rank of so many things that fall on ranks at random (Poisson)."""
    mean = count / split.tensor
    return min(count, mean + math.sqrt(2 * mean * math.log(split.tensor)))


def _part_of_keys(model: Model, split: Split) -> float:
    """Returns the part of keys and values on each rank."""
    known, key = model._key_parts, (split.tensor, split.whole_experts)
    if key not in known:
        share = share_of(model.spec, split.tensor, split.placing)
        known[key] = bytes_of_token(share, getattr(torch, model.dtype)) / max(model.token_bytes, 1)
    return known[key]


def decode_seconds(model: Model, card: Card, split: Split, rows: int, context: int) -> float:
    """Returns the seconds of a step in which so many requests decode."""
    read = _weight_seconds(model, card, split, rows)
    computed = _product_seconds(model, card, split, rows, rows)
    keys = _key_bytes(model, context) * _part_of_keys(model, split) + 2 * model.state_bytes / split.tensor
    seconds = max(read, computed) + card.reached.late * min(read, computed)
    seconds += rows * keys / (card.reached.keys * card.bandwidth)
    return seconds + _overhead(model, card) + _moved(model, card, split, rows)


def prompt_seconds(model: Model, card: Card, split: Split, length: int, rows: int) -> float:
    """Returns the seconds of one prompt in steps of so many rows, which it shares with others."""
    pairs = sum(
        4 * item.heads * item.head_dim * length * min(length / 2, item.window or length)
        for item in model.spec.attentions
    )
    attended = pairs / (split.tensor * card.reached.attended * card.rate)
    states = 2 * model.state_bytes / split.tensor / (card.reached.keys * card.bandwidth) * length / STATE_TOKENS
    sums = _all_reduced(model, card, split, length) * (EXPOSED if _halves(model, card, split, rows) else 1)
    mixed = attended + states
    return _product_seconds(model, card, split, length, 1) + mixed + sums + _handed(model, card, split, length)


def _halves(model: Model, card: Card, split: Split, rows: int) -> bool:
    """True if steps of so many rows compute prompts in two parts."""
    layers = model.spec.layers
    dense = all(isinstance(layer.mixer, AttentionSpec) and isinstance(layer.mlp, MlpSpec) for layer in layers)
    if card.host or card.link < NVLINK or split.tensor == 1 or not dense or not adds_by_norms(model.spec):
        return False
    weights = sum(share.parameters for share in model.shares if share.kind in HALVED)
    return rows >= least_rows(weights // (len(layers) * split.tensor))


def _weight_seconds(model: Model, card: Card, split: Split, rows: int) -> float:
    """Returns the seconds in which a step of so many rows reads weights: to make numbers of those of few bits, and to
    begin and end products of several rows, takes longer."""
    reached, seconds = card.reached, 0.0
    more = card.overhead * (reached.several - 1) if rows > 1 else 0.0
    for share in model.shares:
        unpacked = reached.unpacked * share.parameters / card.instructions if share.bits < 8 else 0.0
        read = max(share.nbytes / (reached.read * card.bandwidth), unpacked)
        seconds += _read_part(model, share, split, rows) * read + more * model.products(share)
    return seconds


def _product_seconds(model: Model, card: Card, split: Split, rows: int, sampled: int) -> float:
    """Returns the seconds of the products of so many rows, of which the output layer has those that are sampled."""
    reached, seconds = card.reached, 0.0
    itemsize = int(getattr(torch, model.dtype).itemsize)
    for share in model.shares:
        count = sampled if share.kind in HEAD else rows
        if count:
            part = _computed_part(model, share, split, count)
            computed = part * model.operations(share) / (reached.computed * _rate(card, share))
            passed = reached.passes * (1 + part) / 2 * model.passed(share) * itemsize / (reached.read * card.bandwidth)
            seconds += count * (computed + passed)
    return seconds


def _overhead(model: Model, card: Card) -> float:
    """Returns the seconds of a step that products take besides; those of a CPU are measured with it."""
    if card.host:
        return 0.0
    more = card.reached.quantized
    return card.overhead * sum(
        model.products(share) * (1 if share.format in PLAIN else 1 + more) for share in model.shares
    )


def _rate(card: Card, share: Share) -> float:
    return card.rate_8bit if share.format.startswith(("fp8 by", "int8 by")) else card.rate


def _key_bytes(model: Model, context: int) -> float:
    """Returns the bytes of keys and values that a decode of one request reads."""
    numbers = sum(
        item.stored * item.kv_heads * item.head_dim * min(context, item.window or context)
        for item in model.spec.attentions
    )
    return numbers * int(getattr(torch, model.dtype).itemsize)


def _moved(model: Model, card: Card, split: Split, rows: int) -> float:
    """Returns the seconds of all-reduces and of transfers between stages for all rows."""
    return _all_reduced(model, card, split, rows) + _handed(model, card, split, rows)


def _handed(model: Model, card: Card, split: Split, rows: int) -> float:
    return (split.pipeline - 1) * (card.delay + _row_bytes(model) * rows / card.link)


def _all_reduced(model: Model, card: Card, split: Split, rows: int) -> float:
    """Returns the seconds of all-reduces, two for each layer."""
    each = card.delay + 2 * (split.tensor - 1) / split.tensor * _row_bytes(model) * rows / card.link
    return 2 * len(model.spec.layers) * each if split.tensor > 1 else 0.0


def _row_bytes(model: Model) -> int:
    return model.spec.hidden_size * int(getattr(torch, model.dtype).itemsize)
