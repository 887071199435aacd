"""The description of a transformers model, found by a forward pass of one token without weights."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvern.errors import UnsupportedModel, in_a_line
from kvern.models.fallback.attention import IMPLEMENTATION, Call, answered
from kvern.models.fallback.spec import TransformersSpec
from kvern.models.limits import SIZES, check_config
from kvern.spec.mixers import AttentionSpec

ATTENDING = frozenset({"full_attention", "sliding_attention"})
"""The layer types that transformers leaves to the attention function."""
OF_THE_LONGEST = frozenset({"dynamic", "longrope"})
"""Rotations that depend on the longest sequence of a batch, beyond the original context."""


def describe(folder: Path) -> TransformersSpec:
    """The model in `folder`, of which nothing but config.json is read; no code of the model's is run.

    Raises UnsupportedModel, with model type and reason, if transformers cannot compute it over a cache of keys and
    values alone.
    """
    config = read_config(folder)
    try:
        check_decoder(config)
        if getattr(config, "quantization_config", None) is not None:
            raise UnsupportedModel("its weights are quantized: use a checkpoint in bfloat16, float16 or float32")
        return _describe(config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{config.model_type} cannot run through transformers: {error}") from error


def read_config(folder: Path) -> PreTrainedConfig:
    """The `config.json` of a folder, for models whose prompts are never padded. Raises UnsupportedModel."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a class of configurations raises
        raise UnsupportedModel(f"transformers cannot read config.json: {in_a_line(error)}") from error
    config.get_text_config().pad_token_id = None
    return config


def check_decoder(config: PreTrainedConfig) -> None:
    """Raises UnsupportedModel if the configuration is not that of a decoder over a cache of keys and values alone."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if config.is_encoder_decoder:
        raise UnsupportedModel("it has an encoder, and kvern runs decoders alone")
    _check_class(config)
    if kinds - ATTENDING:
        raise UnsupportedModel(f"it has layers of the types {', '.join(sorted(kinds - ATTENDING))}")
    sizes = {name: size for name in SIZES if isinstance(size := getattr(text, name, None), int)}
    try:
        check_config(sizes)  # before anything so large is built, by the names that all types have
    except ValueError as error:
        raise UnsupportedModel(f"in config.json {error}") from error
    if getattr(text, "num_kv_shared_layers", None):
        raise UnsupportedModel("layers share the keys and values of others (num_kv_shared_layers)")


def _describe(config: PreTrainedConfig) -> TransformersSpec:
    model = meta_model(config)
    _check_body(model)
    text = config.get_text_config()
    calls = attention_calls(model)
    check_windows(text, calls)
    if len(calls) < text.num_hidden_layers:
        raise UnsupportedModel(f"{len(calls)} of its {text.num_hidden_layers} layers attend")
    dtype = config.dtype if config.dtype is not None else text.dtype
    return TransformersSpec(
        model_type=config.model_type,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        layers=(),
        max_position_embeddings=_context(text),
        bos_token_id=text.bos_token_id,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        calls=calls,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration without memory for weights. Raises UnsupportedModel."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=IMPLEMENTATION, trust_remote_code=False
            ).eval()
    except Exception as error:  # whatever a model raises that its configuration does not fit
        raise UnsupportedModel(f"it cannot be built: {in_a_line(error)}") from error
    return model


def _check_class(config: PreTrainedConfig) -> None:
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if classes is None:
        raise UnsupportedModel("transformers has no causal language model of this type")
    for model in classes if isinstance(classes, tuple | list) else [classes]:
        if model._is_stateful:
            raise UnsupportedModel("its layers keep states of their own")
        if not model._supports_attention_backend:
            raise UnsupportedModel("its attention cannot be replaced")


def _check_body(model: PreTrainedModel) -> None:
    if model.base_model is model:
        raise UnsupportedModel("its output layer is not apart from its body")
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise UnsupportedModel("it takes no positions (position_ids)")


def attention_calls(model: PreTrainedModel) -> tuple[AttentionSpec, ...]:
    """The attentions of one forward pass of a model without memory, in their order. Raises UnsupportedModel."""
    found = []

    def note(call: Call) -> Tensor:
        found.append(call.layer())
        return call.unanswered()

    if model._can_set_experts_implementation():  # its shapes do not depend on the routing of tokens
        model.set_experts_implementation("batched_mm")
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    try:
        with torch.device("meta"), torch.no_grad(), answered(note):
            model.base_model(input_ids=token, position_ids=token, use_cache=False)
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever a model raises that needs numbers for its shapes
        raise UnsupportedModel(f"it does not run without its weights: {in_a_line(error)}") from error
    return tuple(found)


def check_windows(text: PreTrainedConfig, calls: tuple[AttentionSpec, ...]) -> None:
    """Checks that the windows of the calls are those of the masks that transformers would make.

    Raises UnsupportedModel.
    """
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    if kinds is not None and len(kinds) == len(calls):
        expected = [window if kind == "sliding_attention" else None for kind in kinds]
    else:
        expected = [window] * len(calls)
    for index, (call, wanted) in enumerate(zip(calls, expected, strict=True)):
        if call.window != wanted:
            raise UnsupportedModel(
                f"attention {index} is called with a window of {call.window}, and config.json says {wanted}"
            )


def _context(text: PreTrainedConfig) -> int:
    """The longest sequence in tokens for which the rotation does not depend on other requests in the batch."""
    context = getattr(text, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise UnsupportedModel("config.json does not say how long sequences may be (max_position_embeddings)")
    ropes: Any = getattr(text, "rope_parameters", None) or {}
    for rope in [ropes] if "rope_type" in ropes else [item for item in ropes.values() if isinstance(item, Mapping)]:
        if rope.get("rope_type") in OF_THE_LONGEST:
            context = min(context, rope.get("original_max_position_embeddings") or context)
    return context
