"""The description of a model as data: all that families differ in, read from `config.json` by a family's function.

    ModelSpec
    |-- norm: NormSpec                      how every norm of a block computes
    |-- block: BlockSpec                    its norms and their names in the checkpoint, and how its parts are added
    |-- layers: LayerSpec, ...
    |   |-- mixer: AttentionSpec            heads, scale, window
    |   |     or LatentAttentionSpec        keys and values of all heads out of one vector for each token
    |   |     or RecurrentSpec              a state of fixed size in place of keys and values
    |   |     or TwoMixersSpec              attention and a state, over the same rows
    |   |     or None                       this layer is an MLP alone
    |   |-- rope: RopeSpec | None           None: this layer sees no positions
    |   |-- mlp: MlpSpec | MoeSpec | None   None: this layer is a mixer alone
    |   `-- experts: MoeSpec | None         beside the MLP
    |-- additions: AdditionSpec             inputs of each layer's own, residual streams, numbers
    |-- biases, scales                      of linear layers; of embeddings and logits
    |-- encoder: EncoderSpec | None         None: a decoder, which generates
    `-- renames: Rename, ...                from the checkpoint's names to Llama's

Nothing here imports torch; the modules are chosen from it once, when the `Decoder` is built.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from kvern.spec.mixers import AttentionSpec, LatentAttentionSpec, RecurrentSpec, TwoMixersSpec
from kvern.spec.rope_scaling import LinearScaling, RopeScaling

if TYPE_CHECKING:
    from torch import Tensor


Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "clamped_swiglu"]
SWIGLU_SLOPE, SWIGLU_LIMIT = 1.702, 7.0
"""Constants of the activation "clamped_swiglu", see `MoeSpec`."""
Pooling = Literal["mean", "cls", "lasttoken", "end"]
Placement = Literal["attention_in", "attention_out", "mlp_in", "mlp_out"]


@dataclass(frozen=True)
class QueryScaling:
    """Queries at position p are multiplied by `1 + beta * log(1 + floor(p / trained_len))`, as since Llama 4."""

    beta: float
    trained_len: int


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of the first `dim` entries of each head.

    `interleaved`: the planes are the pairs (0, 1), (2, 3), ...; otherwise (0, dim/2), (1, dim/2 + 1), ...
    `query_scaling`: queries grow with their position, too. `axes`: the axis of each plane in a model that reads images,
    0 to 2: time, height or width; (): all planes turn by the one position that a token has.
    """

    theta: float
    dim: int
    scaling: RopeScaling = LinearScaling()
    interleaved: bool = False
    query_scaling: QueryScaling | None = None
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class NormSpec:
    """Root-mean-square or layer norm. `offset` is added to the stored weight (Gemma stores w - 1)."""

    kind: Literal["rms", "layer"] = "rms"
    epsilon: float = 1e-6
    offset: float = 0.0
    weight: bool = True
    bias: bool = False


@dataclass(frozen=True)
class QueryKeyNormSpec:
    """Norm of queries and keys.

    `scope`: "head" has one weight [head_dim] for all heads, "each_head" one [heads, head_dim], and "row" normalises
    over all heads together, weight [heads * head_dim]. `after_rope` tells on which side of the rotation it stands.
    `values`: each head of the values is divided by its root mean square as well.
    """

    norm: NormSpec
    scope: Literal["head", "each_head", "row"] = "head"
    after_rope: bool = False
    values: bool = False


@dataclass(frozen=True)
class MlpSpec:
    """`down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` if not `gated`.

    `gate_scale` multiplies what the gate gives, before its activation, `out_scale` what the MLP gives; both if `gated`.
    `sparsity` > 0: of what the gate gives, before its activation, what exceeds a cutoff stays, and all else is 0; that
    share of numbers that are spread normally is below it.
    """

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    gate_scale: float = 1.0
    out_scale: float = 1.0
    sparsity: float = 0.0


@dataclass(frozen=True)
class MoeSpec:
    """`top_k` of `experts` MLPs of `width`, `gated` or not, chosen by a linear router.

    `scoring` makes the router's scores probabilities over all experts ("softmax"), or scores each alone and, if
    `corrected`, corrects the choice by a learned bias ("sigmoid"). With `groups` > 1 the experts stand in so many of
    one size, and a token chooses within `top_groups` of them: those with the highest score, or, of "sigmoid", those
    whose two highest corrected scores add up to the most. `renormalize` divides the chosen scores by their sum,
    `routed_scale` then multiplies them, and with `expert_scales` a learned number of each expert. `shared_width` > 0
    adds an MLP that every token takes, times a sigmoid gate if `shared_gate`. With `latent` > 0 experts stand between
    projections to rows of that size and back. `bias`: the router and the matrices of all experts have one. The
    activation "clamped_swiglu" is `(up + 1) * gate * sigmoid(SWIGLU_SLOPE * gate)`, of a gate that is at most
    SWIGLU_LIMIT and an up that is at most as far from 0.

    With `placed_over` > 1 whole experts are placed over so many ranks, and `redundant` copies of some of them.
    """

    experts: int
    top_k: int
    width: int
    activation: Activation = "silu"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    corrected: bool = True
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    routed_scale: float = 1.0
    expert_scales: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    gated: bool = True
    latent: int = 0
    bias: bool = False
    placed_over: int = 1
    redundant: int = 0

    @property
    def first_width(self) -> int:
        """Outputs of an expert's first product: of gate and up, or of up alone."""
        return 2 * self.width if self.gated else self.width

    @property
    def slots(self) -> int:
        """Experts that the rank with the most of them has."""
        return -(-(self.experts + self.redundant) // self.placed_over)

    @property
    def has_plain_gate(self) -> bool:
        """Experts are gated through SiLU or GELU, without biases."""
        return self.gated and not self.bias and self.activation in ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class PerLayerSpec:
    """Inputs `[width]` of each token for each layer, beside what the layer before it hands on (Gemma 3n and 4).

    They are rows of a table with `vocab_size` tokens, of which later ones take the first row, and a projection of the
    token's embedding. Behind its MLP each layer projects the residual to `width`, and multiplies the activation of
    that by its input. `padding`: a token, then others that take its row.
    """

    width: int
    vocab_size: int
    activation: Activation
    padding: tuple[int, ...] = ()


@dataclass(frozen=True)
class AltUpSpec:
    """So many residual `streams`, of which layers compute one and correct all (AltUp, Gemma 3n).

    Beside attention a product of rank `laurel_rank` is added (LAuReL). Layers have inputs of their own, too.
    """

    streams: int
    laurel_rank: int


@dataclass(frozen=True)
class LayerSpec:
    """A mixer, an MLP or both: one behind the other, each added to the residual.

    `experts` stand beside the MLP, and are added to it, with norms of their own (Gemma 4).
    """

    mixer: AttentionSpec | LatentAttentionSpec | RecurrentSpec | TwoMixersSpec | None
    rope: RopeSpec | None
    mlp: MlpSpec | MoeSpec | None
    experts: MoeSpec | None = None

    @property
    def mixers(self) -> tuple[AttentionSpec | LatentAttentionSpec | RecurrentSpec, ...]:
        """One, none, or two."""
        if isinstance(self.mixer, TwoMixersSpec):
            return self.mixer.attention, self.mixer.recurrent
        return () if self.mixer is None else (self.mixer,)

    @property
    def mixture(self) -> MoeSpec | None:
        """Its experts, in the place of an MLP or beside one; None: it has none."""
        return self.mlp if isinstance(self.mlp, MoeSpec) else self.experts

    @property
    def cached(self) -> AttentionSpec | None:
        """The attention whose keys and values the KV cache keeps, also for layers that borrow them; None: none."""
        for mixer in self.mixers:
            if isinstance(mixer, LatentAttentionSpec):
                return mixer.over_latents
            if isinstance(mixer, AttentionSpec) and mixer.cache_of is None:
                return mixer
        return None

    @property
    def attention(self) -> AttentionSpec:
        """The attention of a layer with keys and values for each head. Raises TypeError for another layer."""
        for mixer in self.mixers:
            if isinstance(mixer, AttentionSpec):
                return mixer
        raise TypeError(f"a layer with a {type(self.mixer).__name__} has no keys and values of its own")


@dataclass(frozen=True)
class HeadSpec:
    """The head that makes a number for each label of a text's state: `out(norm(activation(dense(x))))`; `out` has a
    bias.

    `norm` is the model's own norm of that place; None: there is none.
    """

    activation: Literal["tanh", "gelu"]
    dense_bias: bool = True
    norm: NormSpec | None = None
    labels: int = 1


@dataclass(frozen=True)
class ProjectionSpec:
    """The matrix from a text's state to its embedding `[width]`, with a bias or without."""

    width: int
    bias: bool = False


@dataclass(frozen=True)
class EncoderSpec:
    """The properties of an encoder, which reads a text as a whole: each token sees those on both sides, unless its
    attention is causal.

    `positions` is the length of the table of learned positions, of which a text's first token takes the row
    `first_position`; 0: there is no such table. `types` is that of the table of kinds of tokens, 0: there is none; the
    second text of a pair is of `second_type`, others are of 0. Texts have `usual_len` tokens at most if nobody says
    otherwise; None: as many as there are positions. Shorter texts are padded to `padded` tokens; 0: none are.

    `first_norm`: a norm follows the sum of the embeddings. `post_norm`: a norm also follows each sum of a block; else
    norms stand before its parts, but for the first attention after a `first_norm`, and one at the end.

    `pooling` says how the states of a text become one: their mean, the first ("cls"), the last, or that of the first
    token with the id `end_token` ("end"; -1: of the token with the highest id). `head` judges it; None: it is the
    text's embedding, or becomes that by the `projection`.
    """

    positions: int = 0
    first_position: int = 0
    types: int = 0
    second_type: int = 0
    usual_len: int | None = None
    padded: int = 0
    first_norm: bool = True
    post_norm: bool = False
    pooling: Pooling = "mean"
    end_token: int = -1
    head: HeadSpec | None = None
    projection: ProjectionSpec | None = None


@dataclass(frozen=True)
class Rename:
    """A rule from the checkpoint's tensor names to Llama's.

    `pattern` (a regular expression) is replaced by `replacement`, as `re.sub` does; where it matched and `transform` is
    given, the tensor is replaced by `transform(tensor, spec)` before it is loaded. `by_rows`: each entry of its first
    dimension becomes one, whatever the others are, so that a part of them can be loaded at a time.
    """

    pattern: str
    replacement: str
    transform: "Callable[[Tensor, ModelSpec], Tensor] | None" = None
    by_rows: bool = False


@dataclass(frozen=True)
class HeadLayerSpec:
    """The layer of a draft head that joins a token's embedding and the state before it, by the names of its tensors.

    A model may have one after its own layers (multi-token prediction, DeepSeek-V3, https://arxiv.org/abs/2412.19437,
    section 2.2). `layer` is the path of the layer and `joined` that of the projection of embedding and state side by
    side. The norms are those of the embedding, of the state, and of the layer's result; "": there is none. `normal`:
    the next state is the layer's result after its norm, else before it.
    """

    layer: str
    joined: str
    embedding_norm: str = ""
    hidden_norm: str = ""
    norm: str = ""
    normal: bool = False


PRE_NORMS: Mapping[Placement, str] = {"attention_in": "input_layernorm", "mlp_in": "post_attention_layernorm"}
POST_NORMS: Mapping[Placement, str] = {
    "attention_out": "post_attention_layernorm",
    "mlp_out": "post_feedforward_layernorm",
}
SANDWICH_NORMS: Mapping[Placement, str] = {
    "attention_in": "input_layernorm",
    "attention_out": "post_attention_layernorm",
    "mlp_in": "pre_feedforward_layernorm",
    "mlp_out": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class BlockSpec:
    """The way in which mixer and MLP of a layer are added to the residual.

    `norms` has the checkpoint's names of the norms by their placement. `parallel`: attention and MLP read the same
    residual and are added together; without an "mlp_in" norm they also share the "attention_in" norm. Both are
    multiplied by `scale` before they are added. `gains` has the names of learned factors, one for each channel, in the
    places of norms.
    """

    norms: Mapping[Placement, str] = field(default_factory=lambda: PRE_NORMS, hash=False)
    parallel: bool = False
    scale: float = 1.0
    gains: Mapping[Placement, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class BiasSpec:
    """The linear layers that have biases: attention's first and last products, and the model's output layer."""

    qkv: bool = False
    output: bool = False
    head: bool = False


@dataclass(frozen=True)
class ScaleSpec:
    """Factors of embeddings and of logits; `softcap` c then replaces a logit l by c * tanh(l / c)."""

    embedding: float = 1.0
    logit: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class AdditionSpec:
    """The parts of layers beside mixer and MLP.

    `per_layer`: inputs of each layer's own. `altup`: several residual streams. `scalars`: the result of a layer is
    multiplied by a number that the checkpoint stores.
    """

    per_layer: PerLayerSpec | None = None
    altup: AltUpSpec | None = None
    scalars: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model, or an encoder.

    `dtype` is the checkpoint's ("bfloat16", ...; None: not stated). `generates`: false for a model without an output
    layer, which gives embeddings and nothing else. `ignored` are regular expressions of checkpoint tensors that are not
    needed. `is_classifier`: its hidden states are judged by a head of their own, and its logits mean nothing. A model
    with an `encoder` reads texts as a whole and generates nothing; None: it is a decoder. `draft_head` is a layer after
    the last one that the checkpoint may have, which drafts tokens.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    norm: NormSpec = NormSpec()
    block: BlockSpec = BlockSpec()
    query_key_norm: QueryKeyNormSpec | None = None
    biases: BiasSpec = BiasSpec()
    scales: ScaleSpec = ScaleSpec()
    additions: AdditionSpec = AdditionSpec()
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    dtype: str | None = None
    generates: bool = True
    renames: tuple[Rename, ...] = ()
    ignored: tuple[str, ...] = ()
    is_classifier: bool = False
    encoder: EncoderSpec | None = None
    draft_head: HeadLayerSpec | None = None

    @property
    def augmented(self) -> bool:
        """Layers have parts beside attention and MLP: inputs of their own, experts beside the MLP, or numbers."""
        beside = any(layer.experts is not None for layer in self.layers)
        return self.additions.per_layer is not None or self.additions.scalars or beside

    @property
    def attending(self) -> tuple[LayerSpec, ...]:
        """The layers that attend to keys and values of their own."""
        return tuple(layer for layer in self.layers if any(isinstance(mixer, AttentionSpec) for mixer in layer.mixers))

    @property
    def attends_to_latents(self) -> bool:
        """Some layer has multi-head latent attention."""
        return any(isinstance(layer.mixer, LatentAttentionSpec) for layer in self.layers)

    @property
    def caching_layers(self) -> tuple[int, ...]:
        """The places of the layers that store keys and values."""
        return tuple(place for place, layer in enumerate(self.layers) if layer.cached is not None)

    @property
    def last_storing_layer(self) -> int:
        """The place of the last layer that stores keys and values, or a state: those behind it attend to others'."""
        states = [
            place for place, layer in enumerate(self.layers) if any(isinstance(m, RecurrentSpec) for m in layer.mixers)
        ]
        return max((*self.caching_layers, *states), default=0)

    @cached_property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attentions of the layers that store keys and values, in their order: the KV cache is made for these."""
        return tuple(layer.cached for layer in self.layers if layer.cached is not None)

    @property
    def recurrent(self) -> tuple[RecurrentSpec, ...]:
        """The mixers that have states, in the order of their layers; none in most models."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers if isinstance(mixer, RecurrentSpec))
