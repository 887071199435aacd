"""A small random model of a type, as transformers makes, computes and saves it."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvern.errors import UnsupportedModel, in_a_line
from kvern.models.fallback.decoder import quiet
from kvern.models.limits import SIZES

LAYERS = 4
VOCABULARY = 131
TOKENS = 40
"""Tokens of the prompt, more than a window of the small model."""
SPREAD = 0.2
_WINDOW = 9
_SIZES: dict[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "dense_intermediate_size": 80,
    "moe_intermediate_size": 24,
    "expert_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "shared_intermediate_size": 40,
    "num_attention_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "sliding_window": _WINDOW,
    "max_position_embeddings": 256,
    "num_nextn_predict_layers": 0,
}
_MOST = {"num_experts_per_tok": 3, "moe_k": 3, "moe_topk": 3, "top_k_experts": 3}
MOST_FAR = 1 << 18
"""The last position that is tried, at most."""
_LEFT_OUT = ("architectures", "transformers_version", "dtype", "model_type", "quantization_config")


@dataclass(frozen=True)
class SmallModel:
    """A model with random weights, saved in `folder`, and its `logits [tokens, vocab]` of the prompt `ids [tokens]`.

    `far_logits` are those of the same prompt from the position `far` on.
    """

    config: PreTrainedConfig
    model: PreTrainedModel
    folder: Path
    ids: Tensor
    logits: Tensor
    far: int
    far_logits: Tensor


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of a text model of the same type with small sizes, and as many kinds of layers."""
    text = config.get_text_config()
    given = {name: value for name, value in text.to_dict().items() if name not in _LEFT_OUT}
    sizes = {name: size for name, size in _SIZES.items() if given.get(name) is not None or name == "head_dim" in given}
    sizes |= {name: min(most, given[name]) for name, most in _MOST.items() if given.get(name)}
    if (kv_heads := given.get("num_key_value_heads")) is not None:
        heads = text.num_attention_heads
        sizes["num_key_value_heads"] = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
    count = text.num_hidden_layers
    lists = {name: _kinds(value) for name, value in given.items() if isinstance(value, list) and len(value) == count}
    tokens = {name: 1 for name in ("bos_token_id", "eos_token_id", "pad_token_id") if given.get(name) is not None}
    return type(text)(**(given | lists | tokens | sizes | {"num_hidden_layers": min(LAYERS, count)}))


def _kinds(values: list[Any]) -> list[Any]:
    """The first entries, the last of them another kind, if there is one."""
    first = values[:LAYERS]
    others = [value for value in values[LAYERS:] if value not in first]
    return [*first[:-1], others[0]] if others else first


@contextmanager
def small_model(config: PreTrainedConfig) -> Iterator[SmallModel]:
    """A random model of a small configuration, in a folder for a while. Raises UnsupportedModel."""
    with TemporaryDirectory() as folder, torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(0)
        try:
            built: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                small_config(config), attn_implementation="eager", trust_remote_code=False
            )
            model: PreTrainedModel = built.float().eval()
            _fill(model)
            ids = torch.randint(2, VOCABULARY, (TOKENS,))
            far = far_position(config)
            logits, far_logits = (logits_at(model, ids, first) for first in (0, far))
            with quiet():
                model.save_pretrained(folder)
        except Exception as error:  # whatever a model raises that its configuration does not fit
            raise UnsupportedModel(f"no small model of this type can be made: {in_a_line(error)}") from error
        yield SmallModel(model.config, model, Path(folder), ids, logits, far, far_logits)


def far_position(config: PreTrainedConfig) -> int:
    """A position behind all numbers of the settings at which attention may change: windows, chunks, trained lengths."""
    text = config.get_text_config()
    most = max(min(text.max_position_embeddings, MOST_FAR) - TOKENS, 0)
    return max([number for number in _numbers(text.to_dict()) if number <= most], default=min(TOKENS, most))


def _numbers(settings: Mapping[str, Any]) -> Iterator[int]:
    """The whole numbers of settings that are neither sizes of parts nor tokens, and more than the tokens tried."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int | float) and float(value).is_integer() and value >= TOKENS:
            is_size = name in SIZES and "position" not in name
            if not is_size and not re.search("_size$|token_id$|theta$", name):
                yield int(value)


def logits_at(model: Any, ids: Tensor, first: int) -> Tensor:
    """The logits `[tokens, vocab]` by transformers of a prompt whose first token is at a position."""
    positions = torch.arange(first, first + len(ids))[None]
    logits: Tensor = model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0]
    return logits.float()


def _fill(model: PreTrainedModel) -> None:
    """Random weights in which each part shows: vectors are near what they were, matrices are not."""
    stored = model.state_dict()
    for tensor in {tensor.data_ptr(): tensor for tensor in stored.values() if tensor.is_floating_point()}.values():
        noise = torch.randn(tensor.shape) * SPREAD
        tensor.copy_(noise if tensor.dim() > 1 else tensor + noise)
