"""The search for a specification: what the facts leave open is tried until the logits of a small model agree."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvern.attention.memory import CacheOptions
from kvern.attention.torch_sdpa import TorchAttention
from kvern.describing.facts import Facts, LayerFacts, facts_of, narrowed
from kvern.describing.small import SmallModel, small_model
from kvern.device.input_batch import build_input_batch
from kvern.device.rows import BatchRows
from kvern.errors import KvernError, UnsupportedModel
from kvern.io.files import reason
from kvern.layers.build import Build
from kvern.models.checkpoint import read_headers
from kvern.models.decoder import Decoder
from kvern.models.describe import with_groups
from kvern.models.fallback.description import check_decoder
from kvern.models.limits import check_spec
from kvern.models.loader import filled_model
from kvern.request.step import ScheduledTokens
from kvern.spec.model import LayerSpec, ModelSpec, MoeSpec, Placement, QueryKeyNormSpec

AGREEMENT = 1e-4
"""The largest difference of logits in float32, as a share of their spread."""
FAR_AGREEMENT = 1e-3
ROUNDING = 2.0**-22
"""The limits at far positions, and what is added for each position before: angles are rounded as they grow."""
MOST = 800
"""Candidates that are tried."""
MOST_IMPOSSIBLE = 32
"""Candidates of which no decoder can be made, if there are no others before."""
_IMPOSSIBLE = (ValueError, RuntimeError, AssertionError, LookupError, TypeError)
BLOCK_SIZE = 16
_UNKNOWN = re.compile("chunk|floor|window|temperature|limit|clip|clamp")
_KNOWN = re.compile(r"^(use_)?sliding_window$|^max_window_layers$|sliding_window_pattern$")
_PLACES: tuple[Placement, ...] = ("attention_in", "mlp_in", "attention_out", "mlp_out")
_HINTS: Mapping[Placement, str] = {
    "attention_in": r"^input|pre_att|^att|ln_1|self_attention",
    "mlp_in": r"pre_(feed|mlp|ffn)|^(feed|mlp|ffn)|ln_2|post_attention_layernorm",
    "attention_out": r"post_(att|self_att|norm1)",
    "mlp_out": r"post_(feed|mlp|ffn|norm2)",
}
"""Names that norms in these places often have."""


class Choice(NamedTuple):
    """The facts that the tree of modules does not tell.

    norms        the places of the norms of a layer, in the order in which they were made
    parallel     attention and MLP read the same residual
    unrotated    kinds of layers that know no positions
    scales       the place among the factors of embeddings, residuals and logits that settings may mean
    scoring, renormalize, routed_scale    see `MoeSpec`
    """

    norms: tuple[Placement, ...]
    parallel: bool
    interleaved: bool
    unrotated: tuple[str, ...]
    after_rope: bool
    scales: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    routed_scale: float = 1.0


@dataclass(frozen=True)
class Found:
    """A specification, the choice that it is made by, and how many others were tried before."""

    spec: ModelSpec
    choice: Choice
    tried: int
    off: float


def search(config: PreTrainedConfig) -> Found:
    """The specification of a configuration's model, proved on a small model. Raises UnsupportedModel if none agrees."""
    check_decoder(config.get_text_config())
    _check_settings(config)
    with small_model(config) as small:
        names = [tensor.name for tensor in read_headers(small.folder)]
        try:
            facts = narrowed(facts_of(small.config), names)
            candidates = list(islice(choices(facts), MOST))
        except KeyError as error:
            raise UnsupportedModel(f"config.json lacks {error.args[0]!r:.60}") from error
        closest = math.inf
        for tried, choice in enumerate(candidates):
            try:
                off = deviation(small, spec_of(facts, choice))
            except (KvernError, *_IMPOSSIBLE) as error:
                off = math.inf
                if tried >= MOST_IMPOSSIBLE and closest == math.inf:
                    raise UnsupportedModel(f"no decoder can be made of what is found: {reason(error)}") from error
            if off <= AGREEMENT:
                _check_far(small, spec_of(facts, choice))
                whole = replace(facts_of(config), renames=facts.renames)
                return Found(spec_of(whole, choice), choice, tried, off)
            closest = min(closest, off)
    raise UnsupportedModel(
        f"none of {len(candidates)} candidates computes what transformers does: the logits of the closest are off by "
        f"{closest:.2g} of their spread"
    )


def _check_settings(config: PreTrainedConfig) -> None:
    """Raises UnsupportedModel for settings whose effect a short prompt and small numbers do not show."""
    for name, value in config.get_text_config().to_dict().items():
        if value and _UNKNOWN.search(name) and not _KNOWN.search(name):
            raise UnsupportedModel(f"{name} is {value!r:.60}, whose effect a small model does not show")


def choices(facts: Facts) -> Iterator[Choice]:
    """All choices, likely ones first."""
    kinds = {layer.kind for layer in facts.layers if layer.kind}
    unrotated: list[tuple[str, ...]] = [(), ("full_attention",)] if len(kinds) > 1 else [()]
    after_rope = [False, True] if facts.layers[0].qk_norm else [False]
    moe = any(isinstance(layer.mlp, MoeSpec) for layer in facts.layers)
    scoring: list[Literal["softmax", "sigmoid"]] = ["softmax", "sigmoid"] if moe else ["softmax"]
    if any(isinstance(layer.mlp, MoeSpec) and layer.mlp.corrected for layer in facts.layers):
        scoring = ["sigmoid"]
    renormalize = [True, False] if moe else [True]
    routed = _factors(facts.settings, r"rout.*scal") if moe else [1.0]
    for norms, parallel in _placements(facts.layers[0].norms):
        for others in product(
            [False, True], unrotated, after_rope, range(len(_scales(facts))), scoring, renormalize, routed
        ):
            yield Choice(norms, parallel, *others)


def _placements(names: tuple[str, ...]) -> list[tuple[tuple[Placement, ...], bool]]:
    """The places of norms with these names, and whether attention and MLP are parallel; likely ones first."""
    if len(names) == 1:
        return [(("attention_in",), True)]
    found = [(places, False) for places in permutations(_PLACES, len(names))]
    found.sort(key=lambda item: -sum(map(_fits, names, item[0])))
    return found + ([(("attention_in", "mlp_in"), True)] if len(names) == 2 else [])


def _fits(name: str, place: Placement) -> bool:
    return re.search(_HINTS[place], name) is not None


def _scales(facts: Facts) -> list[tuple[float, float, float]]:
    """Factors of embeddings, residuals and logits, by the names of settings."""
    settings = facts.settings
    embedding = [facts.embedding_factor]
    if facts.embedding_factor == 1.0:
        embedding = list(dict.fromkeys((*_factors(settings, "embed.*(mult|scal)|scale_emb"), 1.0, _root(settings))))
    residual = _factors(settings, "resid.*(mult|scal)")
    logit = [*_factors(settings, "^(logit_scale|lm_head_multiplier)$")]
    logit += [1 / factor for factor in _factors(settings, "^logits_scaling$") if factor != 1.0]
    return list(product(embedding, reversed(residual), reversed(logit)))


def _root(settings: Mapping[str, Any]) -> float:
    return math.sqrt(settings["hidden_size"])


def _factors(settings: Mapping[str, Any], names: str) -> list[float]:
    """1 and the numbers of settings with such names."""
    found = [value for name, value in settings.items() if re.search(names, name) and type(value) in (int, float)]
    return list(dict.fromkeys((1.0, *(float(value) for value in found if value))))


def spec_of(facts: Facts, choice: Choice) -> ModelSpec:
    """The specification of a model with these facts and this choice."""
    settings = facts.settings
    qk_norm = facts.layers[0].qk_norm
    scope: Any = "head" if qk_norm is None else qk_norm[1]
    embedding, residual, logit = _scales(facts)[choice.scales]
    dtype = facts.config.dtype
    norms = dict(zip(choice.norms, facts.layers[0].norms, strict=True))
    fields = {
        "model_type": facts.config.model_type,
        "vocab_size": settings["vocab_size"],
        "hidden_size": settings["hidden_size"],
        "layers": tuple(_layer(layer, choice) for layer in facts.layers),
        "max_position_embeddings": settings["max_position_embeddings"],
        "norm": facts.norm,
        "block_norms": norms,
        "parallel": choice.parallel,
        "residual_scale": residual,
        "query_key_norm": None if qk_norm is None else QueryKeyNormSpec(qk_norm[0], scope, choice.after_rope),
        "qkv_bias": facts.qkv_bias,
        "output_bias": facts.output_bias,
        "lm_head_bias": facts.head_bias,
        "embedding_scale": embedding,
        "logit_scale": logit,
        "logit_softcap": settings.get("final_logit_softcapping"),
        "tie_word_embeddings": bool(settings.get("tie_word_embeddings", False)),
        "bos_token_id": settings.get("bos_token_id"),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "renames": facts.renames,
    }
    return ModelSpec(**with_groups(fields))


def _layer(layer: LayerFacts, choice: Choice) -> LayerSpec:
    mlp = layer.mlp
    if isinstance(mlp, MoeSpec):
        given = choice.scoring, choice.renormalize, choice.routed_scale
        mlp = replace(mlp, scoring=given[0], renormalize=given[1], routed_scale=given[2])
    rope = None if layer.kind in choice.unrotated else replace(layer.rope, interleaved=choice.interleaved)
    return LayerSpec(layer.attention, rope, mlp)


def deviation(small: SmallModel, spec: ModelSpec) -> float:
    """The largest difference of kvern's logits from the small model's, as a share of their spread.

    Raises KvernError, or an error of PyTorch or Python, if no decoder can be made of the specification.
    """
    check_spec(spec)
    return difference(logits_of(load(spec, small.folder), small.ids), small.logits)


def _check_far(small: SmallModel, spec: ModelSpec) -> None:
    """Raises UnsupportedModel if the logits of the prompt differ at far positions."""
    decoder = load(spec, small.folder, small.far + len(small.ids))
    off = difference(logits_of(decoder, small.ids, small.far), small.far_logits)
    if off > bound(small.far):
        raise UnsupportedModel(f"logits are off by {off:.2g} of their spread from position {small.far} on")


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of logits, as a share of the spread of those that are wanted."""
    off = float((found - wanted).abs().max() / wanted.std())
    return math.inf if math.isnan(off) else off


def bound(first: int) -> float:
    """The largest `difference` of a prompt whose first token is at a position."""
    return FAR_AGREEMENT + ROUNDING * first if first else AGREEMENT


def load(spec: ModelSpec, folder: Path, length: int = 0) -> Decoder:
    """The float32 decoder of a specification with the weights of a folder, for positions before `length` at least.

    Raises KvernError.
    """
    build = Build(torch.float32, torch.device("cpu"), max(spec.max_position_embeddings, length))
    return filled_model(Decoder, spec, build, folder, read_headers(folder))


def logits_of(decoder: Decoder, ids: Tensor, first: int = 0) -> Tensor:
    """The logits `[tokens, vocab]` of one prompt `[tokens]` over a cache, whose first token is at a position."""
    spec = decoder.spec
    blocks = -(-len(ids) // BLOCK_SIZE)
    rows = BatchRows(1, len(ids), blocks, torch.device("cpu"))
    rows.tokens[0, : len(ids)] = ids.to(rows.tokens)
    rows.block_table[:] = torch.arange(blocks)
    given = tuple(spec.attentions), blocks, BLOCK_SIZE, torch.float32, torch.device("cpu")
    attention = TorchAttention(CacheOptions(*given, sinks=decoder.sinks))
    batch = build_input_batch(rows, [ScheduledTokens(0, 0, len(ids), 1)], BLOCK_SIZE)
    with torch.inference_mode():
        return decoder.logits(decoder(batch.token_ids, batch.positions + first, attention.plan(batch)))
