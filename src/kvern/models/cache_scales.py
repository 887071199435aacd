"""Scales of keys and values that a checkpoint brings for a KV cache in 8 bits."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvern.errors import CorruptCheckpoint
from kvern.models.checkpoint import StoredTensor, open_map, read_headers
from kvern.models.loader import llama_name
from kvern.models.share import share_of
from kvern.ranks.ranks import ALONE, Ranks
from kvern.spec.model import ModelSpec

PLACES = (
    r"(?P<kind>[kv]|kv)_scale",  # compressed-tensors
    r"attn\.(?P<kind>[kv]|kv)_scale",
    r"(?P<kind>[kv])_proj\.(?P=kind)_scale",  # modelopt
    r"qkv_proj\.(?P<kind>[kv]|kv)_scale",
    r"(?P<kind>[kv])_proj\.output_scale",  # AutoFP8
)
NAMES = [re.compile(rf"^model\.layers\.(?P<layer>\d+)\.self_attn\.{place}$") for place in PLACES]
STORED_LARGEST = {"float": 448.0, "int": 127.0}
"""The largest code by `quantization_config.kv_cache_scheme.type`, for which stored scales are made."""


def stored_scales(
    folder: Path, config: Mapping[str, Any], spec: ModelSpec, largest_code: float, ranks: Ranks = ALONE
) -> list[torch.Tensor | None]:
    """Scales of each layer with a cache, [2, kv_heads] float32, for codes up to `largest_code`; None: there are none.

    `spec` is of the whole model; one of several `ranks` gets the scales of its heads. Raises CorruptCheckpoint for
    scales that are not positive numbers, for one head or for all, of both keys and values.
    """
    quantization = config.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None
    kind = scheme.get("type") if isinstance(scheme, dict) else None
    factor = STORED_LARGEST.get(str(kind), STORED_LARGEST["float"]) / largest_code
    caching, heads = spec.caching_layers, _heads(spec, ranks)
    found: dict[tuple[int, str], torch.Tensor] = {}
    for tensor in read_headers(folder):
        name, _ = llama_name(tensor.name, spec.renames)
        match = next(filter(None, (pattern.match(name) for pattern in NAMES)), None)
        layer = -1 if match is None else int(match["layer"])
        if match is not None and layer in caching:
            scale = _read(tensor, spec.layers[layer].attention.kv_heads)[heads[layer]] * factor
            found |= {(layer, kind): scale for kind in match["kind"]}
    for layer, kind in found:
        other = {"k": "v", "v": "k"}[kind]
        if (layer, other) not in found:
            raise CorruptCheckpoint(f"{folder} has {kind}_scale of layer {layer}, and no {other}_scale: add it")
    return [torch.stack((found[layer, "k"], found[layer, "v"])) if (layer, "k") in found else None for layer in caching]


def _heads(spec: ModelSpec, ranks: Ranks) -> dict[int, slice]:
    """The heads of a rank, by layer with a cache."""
    mixers = share_of(spec, ranks.size).attentions
    held = [ranks.share(mixer.kv_heads, mixer.copies).held for mixer in mixers]
    return {layer: slice(heads.start, heads.stop) for layer, heads in zip(spec.caching_layers, held, strict=True)}


def _read(tensor: StoredTensor, kv_heads: int) -> torch.Tensor:
    """[kv_heads] float32."""
    count = torch.Size(tensor.shape).numel()
    if count not in (1, kv_heads):
        raise CorruptCheckpoint(
            f"{tensor.name} has {count} scales {list(tensor.shape)}: it must have one, or one of each of the layer's "
            f"{kv_heads} KV heads"
        )
    _, rows = next(tensor.runs(open_map(tensor.file), whole=True))
    scale = rows.reshape(-1).float()
    if not bool((scale.isfinite() & (scale > 0)).all()):
        worst = next(value for value in scale.tolist() if not 0 < value < float("inf"))
        raise CorruptCheckpoint(f"{tensor.name} has the scale {worst}: scales must be finite and above 0")
    return scale.expand(kv_heads).contiguous()
