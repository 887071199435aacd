"""Checkpoints of draft heads: EAGLE's and EAGLE-3's, and the layer for multi-token prediction within a model's own.

fc, norm, lm_head, d2t, midlayer.* or layers.0.*     EAGLE-3, as its authors, SpecForge and speculators write it
fc, layers.0.*                                       EAGLE
mtp.*, model.layers.N.* behind the last layer        the model's own, see `HeadLayerSpec`
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from kvern.drafting.models.choice import entries_of, is_draft_head
from kvern.drafting.models.head import DraftHead, DraftHeadSpec, Eagle3Spec, make_draft_head
from kvern.errors import UnsupportedModel
from kvern.layers.linear_format import LinearFormat
from kvern.models.checkpoint import StoredTensor, read_headers
from kvern.models.decoder import Decoder
from kvern.models.loader import filled_model, llama_name, read_config, stored_methods
from kvern.models.registry import Config, spec_from_config
from kvern.models.share import share_of
from kvern.ranks.ranks import Ranks
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import BlockSpec, HeadLayerSpec, MlpSpec, ModelSpec, MoeSpec, Rename

_EAGLE = HeadLayerSpec(layer="model.layers.0", joined="fc")
_EAGLE3 = HeadLayerSpec(layer="model.layers.0", joined="fc", norm="model.norm")
_MIDLAYER = Rename(r"^midlayer\.", "model.layers.0.")
_COPIES = r"\.layers\.\d+\.(embed_tokens|shared_head\.head)\."
"""Copies of the model's embeddings and output layer."""
_UNUSED = r"^(t2d$|verifier_)"


def load_draft_head(
    folder: Path,
    target: Decoder,
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    kernels: frozenset[str] | None = None,
    unquantized: LinearFormat | None = None,
    quantization: str | None = None,
) -> DraftHead:
    """Build the head of a folder beside `target`, in its precision and on its device, and load its weights.

    The folder is the head's own, or the model's, whose layer for multi-token prediction is meant. Of several ranks it
    is a share, as `target` is. Options as those of `load_model`, but without `kernels` those of `target`. Raises
    ModelNotFound, UnsupportedModel or CorruptCheckpoint.
    """
    head, stored = read_draft_head(folder, target.spec, target.build.ranks, dummy=load_format == "dummy")
    linear = stored_methods(read_config(folder), head.model, stored or [], unquantized, quantization)
    build = replace(target.build, linear=linear, kernels=target.build.kernels if kernels is None else kernels)
    return filled_model(
        lambda model, build: make_draft_head(head, target, model, build), head.model, build, folder, stored
    )


def read_draft_head(
    folder: Path, target: ModelSpec, ranks: Ranks, *, dummy: bool = False
) -> tuple[DraftHeadSpec, list[StoredTensor] | None]:
    """The head of a folder, as `load_draft_head` takes it, and its tensors; `dummy`: it needs none. Raises the same."""
    config = read_config(folder)
    stored = None if dummy else read_headers(folder)
    if not is_draft_head(folder, dummy=dummy):
        head = prediction_of(target)
        return head, None if stored is None else _of_prediction(head, stored, folder)
    entries = ranks.stage.entries if ranks.stage.count > 1 else entries_of(config, len(target.layers))
    head = read_eagle(config, target, entries, None if stored is None else {tensor.name for tensor in stored})
    return replace(head, model=share_of(head.model, ranks.size)), stored


def prediction_of(target: ModelSpec) -> DraftHeadSpec:
    """The head within a model's own checkpoint. Raises UnsupportedModel if models of its type have none."""
    if target.draft_head is None:
        raise UnsupportedModel(f"{target.model_type} has no layer that predicts further tokens; give a draft model")
    layer = next(layer for layer in reversed(target.layers) if layer.cached is not None)
    experts = (layer.mlp for layer in reversed(target.layers) if isinstance(layer.mlp, MoeSpec))
    layer = replace(layer, mlp=next(experts, layer.mlp))
    model = replace(target, layers=(layer,), ignored=(_COPIES,), draft_head=None)
    return DraftHeadSpec(model, target.draft_head, target.hidden_size)


def _of_prediction(head: DraftHeadSpec, stored: list[StoredTensor], folder: Path) -> list[StoredTensor]:
    """The tensors of a model's checkpoint that are its head's."""
    parts = head.parts
    paths = (parts.layer, parts.joined, parts.embedding_norm, parts.hidden_norm, parts.norm)
    begins = tuple(f"{path}." for path in paths if path)
    found = [tensor for tensor in stored if llama_name(tensor.name, head.model.renames)[0].startswith(begins)]
    if not found:
        raise UnsupportedModel(
            f"the weights in {folder} have no layer for multi-token prediction ({parts.layer}); give a draft model"
        )
    return found


def read_eagle(
    config: Config, target: ModelSpec, entries: Sequence[int], names: Collection[str] | None
) -> DraftHeadSpec:
    """The head of EAGLE or EAGLE-3 that a `config.json` describes, whose files hold tensors of these names.

    `entries`: of `entries_of`. No names: there are no files, and what they decide is as in most. Raises
    UnsupportedModel.
    """
    inner: Mapping[str, Any] = config.get("transformer_layer_config") or config.get("model") or config
    kind = inner.get("model_type") or "llama"
    given = {**inner, "architectures": [], "model_type": "llama" if "eagle" in kind else kind, "bias": False}
    model = spec_from_config(given)
    [layer, *others] = model.layers
    if others or not isinstance(layer.mixer, AttentionSpec) or not isinstance(layer.mlp, MlpSpec):
        raise UnsupportedModel(f"a draft head of {kind} with {len(model.layers)} layers: one with an MLP is known")
    if model.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            f"the draft head is for a vocabulary of {model.vocab_size} tokens, and the model has {target.vocab_size}"
        )
    model = replace(model, renames=(_MIDLAYER, *model.renames), ignored=(_UNUSED,), tie_word_embeddings=False)
    own_embedding = names is not None and "embed_tokens.weight" in names
    if not entries:
        without_norm = replace(model, block=BlockSpec({"mlp_in": "post_attention_layernorm"}))
        bias = bool(config.get("bias")) if names is None else "fc.bias" in names
        return DraftHeadSpec(without_norm, _EAGLE, target.hidden_size, joined_bias=bias, own_embedding=own_embedding)
    if config.get("fc_norm"):
        raise UnsupportedModel("fc_norm is true: draft heads are known that normalise no states, or all at once")
    eagle3 = Eagle3Spec(
        tuple(entries),
        norm_before_joined=bool(config.get("norm_before_fc")),
        normal_residual=bool(config.get("norm_before_residual", "transformer_layer_config" in config)),
    )
    drafted = config["draft_vocab_size"] or model.vocab_size
    if type(drafted) is not int or not 0 < drafted <= model.vocab_size:
        raise UnsupportedModel(f"draft_vocab_size is {drafted!r:.60}: it must be from 1 to {model.vocab_size}")
    wide = replace(layer, mixer=replace(layer.mixer, inputs=2 * model.hidden_size))
    if drafted == model.vocab_size:
        model = replace(model, ignored=(*model.ignored, r"^d2t$"))
    return DraftHeadSpec(
        replace(model, layers=(wide,)),
        replace(_EAGLE3, normal=bool(config.get("norm_output"))),
        len(eagle3.entries) * target.hidden_size,
        drafted=None if drafted == model.vocab_size else drafted,
        own_embedding=own_embedding,
        own_output=names is None or "lm_head.weight" in names,
        eagle3=eagle3,
    )
