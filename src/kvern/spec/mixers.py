"""The descriptions of mixers, the first part of a layer: attention, or a mixer that keeps a state."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Gating = Literal["before_norm", "after_norm", "without_norm"]


EXPANDED_HEADS = 8
"""The most heads whose keys and values are made of latents at a time."""
WIDEST_EXPANDED = 256


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention.

    `scale` multiplies query-key products. `window` is the number of keys that a query sees, its own included (None: all
    before it). `softcap` c replaces a score s by c * tanh(s / c). `gated`: the query's projection gives each head a
    query and a gate, whose sigmoid multiplies what the head attends to. `value_dim`: values are the first entries of
    keys, and are not stored beside them (None: they are as wide as keys, and stored). `causal`: a query sees nothing
    behind it; else it sees as many keys behind it as before it. `sinks`: each head has a learned logit that takes part
    in the softmax and has no value, so that a query may attend to nothing (Xiao et al. 2023, "Efficient Streaming
    Language Models with Attention Sinks", section 3.3). `keys_are_values`: values are what is projected for the keys,
    before its norm and rotation. `cache_of`: the place in the model of an earlier layer whose keys and values this one
    attends to (None: it has its own). `expanded`: of keys that are latents, the attention to what is made of them, for
    so many heads at a time (None: nothing that kernels know). `inputs`: how many numbers of a token it projects (None:
    the hidden size). `copies`: so many neighbouring ranks have the same KV heads. `spans`: a query in a span of the
    prompt sees all of it, as far as its window reaches back.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    gated: bool = False
    value_dim: int | None = None
    causal: bool = True
    sinks: bool = False
    keys_are_values: bool = False
    cache_of: int | None = None
    expanded: "AttentionSpec | None" = None
    inputs: int | None = None
    copies: int = 1
    spans: bool = False

    @property
    def own_kv_heads(self) -> int:
        """KV heads that the layer computes itself: none where it attends to another's."""
        return self.kv_heads if self.cache_of is None else 0

    @property
    def stored(self) -> int:
        """The number of vectors that a cache holds of each token and KV head: key and value, or one that is both."""
        return 2 if self.value_dim is None else 1

    @property
    def width(self) -> int:
        """Entries of a key over all KV heads."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class IndexerSpec:
    """An indexer, which selects `top_k` keys for each query by `heads` index queries and an index key of each token."""

    heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True)
class LatentAttentionSpec:
    """One layer's multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

    A token is kept as a latent of `kv_lora_rank` numbers, of which each head makes a key of `qk_nope_head_dim` and a
    value of `v_head_dim` entries, and as one key of `qk_rope_head_dim` entries, rotated, that all heads share. Queries
    come out of `q_lora_rank` numbers (None: of the hidden state at once). Both are normalised, with `epsilon`. `scale`
    multiplies query-key products. `indexer`: queries attend to the keys that it selects (None: to all before them); its
    own key of a token is kept behind the token's latent.
    """

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    epsilon: float = 1e-6
    indexer: IndexerSpec | None = None

    @property
    def over_latents(self) -> AttentionSpec:
        """The attention as the cache sees it: the queries of all heads over one key, which is the value too."""
        index = 0 if self.indexer is None else self.indexer.head_dim
        width = self.kv_lora_rank + self.qk_rope_head_dim + index
        return AttentionSpec(self.heads, 1, width, self.scale, value_dim=self.kv_lora_rank, expanded=self._expanded)

    @property
    def _expanded(self) -> AttentionSpec | None:
        """Heads are as wide as kernels know them, and so many that few launches do."""
        widest = max(self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim)
        together = next(count for count in range(EXPANDED_HEADS, 0, -1) if self.heads % count == 0)
        size = 1 << (widest - 1).bit_length()
        return AttentionSpec(together, together, size, self.scale) if size <= WIDEST_EXPANDED else None


class StateTensor(NamedTuple):
    """One of the tensors that a layer keeps for each request: float32 if `exact`, else in the model's dtype."""

    shape: tuple[int, ...]
    exact: bool = False


@dataclass(frozen=True)
class DeltaNetSpec:
    """One layer's gated delta net: linear attention over a state (Yang et al. 2024, Gated Delta Networks).

    A state is a matrix [key_dim, value_dim] for each of `value_heads`, of which as many neighbours share each of
    `key_heads` queries and keys. Queries, keys and values go through a causal convolution over `kernel` tokens. What is
    read is normalised for each head, with `epsilon`, and gated. `grouped`: the checkpoint projects key head by key head
    (in_proj_qkvz, in_proj_ba), else one part after another (in_proj_qkv, in_proj_z, in_proj_b, in_proj_a).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    epsilon: float
    grouped: bool = False

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and the matrices."""
        matrices = (self.value_heads, self.key_dim, self.value_dim)
        return StateTensor((self.kernel - 1, self.channels)), StateTensor(matrices, exact=True)

    @property
    def written(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what a token writes to the matrices: keys, values, and what is left of those of each head."""
        return (self.key_heads, self.key_dim), (self.value_heads, self.value_dim), (self.value_heads,)


@dataclass(frozen=True)
class ShortConvSpec:
    """One layer's gated short convolution, causal and over `kernel` tokens (Liquid AI 2025, LFM2).

    Each of `channels` is gated before it is convolved and behind. `bias`: projections and convolution have one.
    """

    channels: int
    kernel: int
    bias: bool = False

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution."""
        return (StateTensor((self.kernel - 1, self.channels)),)

    @property
    def written(self) -> tuple[tuple[int, ...], ...]:
        """There are no matrices."""
        return ()


@dataclass(frozen=True)
class Mamba2Scales:
    """Factors of the parts of a token's projection, before convolution, activations and steps, and of the result."""

    gate: float = 1.0
    value: float = 1.0
    key: float = 1.0
    query: float = 1.0
    step: float = 1.0
    out: float = 1.0


@dataclass(frozen=True)
class Mamba2Spec:
    """One layer's Mamba-2 (Dao and Gu 2024, Transformers are SSMs).

    A state is a matrix [state_dim, head_dim] for each of `heads`, of which as many neighbours share each of `groups` of
    what writes to it and reads it, its keys and queries. These and what is written, its values, go through a causal
    convolution over `kernel` tokens. What is read is gated and normalised in as many groups, with `epsilon`: `gating`
    tells on which side of the norm the gate stands, or that there is no norm. `bias` and `conv_bias`: the projections,
    or the convolution, have one. `copies`: so many neighbouring ranks have heads of the same group.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel: int
    epsilon: float
    bias: bool = False
    conv_bias: bool = True
    gating: Gating = "before_norm"
    scales: Mamba2Scales = Mamba2Scales()
    copies: int = 1

    @property
    def inner(self) -> int:
        """Numbers of a token that are written to the states, and read of them."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and the matrices, those of a group side by side."""
        matrices = (self.groups, self.state_dim, self.inner // self.groups)
        return StateTensor((self.kernel - 1, self.channels)), StateTensor(matrices, exact=True)

    @property
    def written(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what a token writes to the matrices: keys, values, and what is left of those of each head."""
        return (self.groups, self.state_dim), (self.groups, self.inner // self.groups), (self.heads,)


RecurrentSpec = DeltaNetSpec | ShortConvSpec | Mamba2Spec
"""A mixer that keeps a state of fixed size for each request: the tensors `states`, of any number and shape."""


@dataclass(frozen=True)
class TwoMixersSpec:
    """Attention and what keeps a state, over the same rows; what attention gives counts `attention_scale` times."""

    attention: AttentionSpec
    recurrent: RecurrentSpec
    attention_scale: float = 1.0
