"""Logits and hidden states of a model for one whole prompt, without an engine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvern.layers.linear import Weighted
from kvern.layers.linear_method import LinearMethod
from kvern.layers.states import new_states
from kvern.layers.step_context import NO_ADAPTERS, Context, StepAdapters, rows_of
from kvern.models.decoder import Decoder
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import LayerSpec, ModelSpec
from tests.support.families import reference_logits

TOLERANCE = 1e-4
PROMPT = torch.randint(3, 131, (41,), generator=torch.Generator().manual_seed(7)).tolist()


class DenseAttend:
    """Causal attention over one whole prompt, straight from its definition."""

    def __init__(self, decoder: Decoder) -> None:
        self.layers, self.sinks = decoder.spec.attentions, decoder.sinks
        self.stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.store(layer, key, value)
        return self.over_cache(layer, query)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.stored[layer] = key, value

    def cache(self, layer: int) -> torch.Tensor:
        return self.stored[layer][0][None, None]

    def contexts(self, layer: int) -> list[Context]:
        count = len(self.stored[layer][0])
        return [Context(slice(0, count), torch.arange(count))]

    def over_cache(self, layer: int, query: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        spec = self.layers[layer]
        key, value = (stored.repeat_interleave(spec.heads // spec.kv_heads, 1) for stored in self.stored[layer])
        scores = torch.einsum("qhd,khd->hqk", query, key) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
        hidden = (distance < 0) | (distance >= (spec.window or len(key)))
        scores = scores.masked_fill(hidden, -torch.inf)
        if spec.sinks:
            sinks = self.sinks[layer].to(scores.dtype)[:, None, None].expand(-1, len(query), 1)
            scores = torch.cat((scores, sinks), -1)
        return rows_of(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value), wanted)


def logits(decoder: Decoder, token_ids: list[int], adapters: StepAdapters = NO_ADAPTERS) -> torch.Tensor:
    with torch.inference_mode():
        return decoder.logits(hidden_states(decoder, token_ids, adapters))


def hidden_states(decoder: Decoder, token_ids: list[int], adapters: StepAdapters = NO_ADAPTERS) -> torch.Tensor:
    with torch.inference_mode():
        positions, attend = torch.arange(len(token_ids)), DenseAttend(decoder)
        states = new_states(decoder.spec.recurrent, [len(token_ids)], decoder.build.dtype, decoder.build.device)
        return decoder(torch.tensor(token_ids), positions, attend, adapters=adapters, states=states)


def error(decoder: Decoder, folder: Path) -> float:
    return (logits(decoder, PROMPT) - reference_logits(folder, PROMPT)).abs().max().item()


def each_layer(spec: ModelSpec, change: Callable[[LayerSpec], LayerSpec]) -> ModelSpec:
    return replace(spec, layers=tuple(change(layer) for layer in spec.layers))


def with_attention(**fields: Any) -> Callable[[ModelSpec], ModelSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        attention: AttentionSpec = replace(layer.attention, **fields)
        return replace(layer, mixer=attention)

    return lambda spec: each_layer(spec, change)


def methods_by_path(decoder: Decoder) -> dict[str, LinearMethod]:
    return {path: module.method for path, module in decoder.named_modules() if isinstance(module, Weighted)}
