"""The weights of a decoder that kvern's loader has filled, as arrays for JAX."""

from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from kvern.layers.attention import Attention
from kvern.layers.head_norms import HeadNorm
from kvern.layers.linear import Weighted
from kvern.layers.norm import Norm
from kvern.models.decoder import Decoder

Weights = Mapping[str, Any]
"""A tree: `embed`, `norm`, `head`, and `layers`. Matrices are `weight [outputs, inputs]`, and maybe `bias`."""


def weights_of(decoder: Decoder) -> Weights:
    """The weights in the model's dtype, norms in float32; of a model on the meta device their shapes alone.

    Codes of quantized checkpoints become plain numbers.
    """
    layers = [_layer(layer, decoder.build.dtype) for layer in decoder.layers]
    found = {
        "embed": _array(_plain(decoder.embed_tokens)),
        "norm": _norm(decoder.norm),
        "layers": layers,
    }
    return found if decoder.spec.tie_word_embeddings else {**found, "head": _matrix(decoder.lm_head)}


def _layer(layer: Any, dtype: torch.dtype) -> Weights:
    attention: Attention = layer.self_attn
    found = {
        "attention_norm": _norm(layer.attention_in),
        "qkv": _matrix(attention.qkv_proj),
        "output": _matrix(attention.o_proj),
        "mlp_norm": _norm(layer.mlp_in),
        "gate_up": _matrix(layer.mlp.gate_up_proj),
        "down": _matrix(layer.mlp.down_proj),
    }
    norm = attention.attended.norm_before
    if isinstance(norm, HeadNorm):
        found["head_norm"] = _array(norm.weight / norm.gain)
    return found


def _norm(norm: Norm) -> Any:
    return _array(norm.kernel_weight.float() / norm.gain)


def _matrix(linear: Weighted) -> Weights:
    found = {"weight": _array(_plain(linear))}
    return found if linear.bias is None else {**found, "bias": _array(linear.bias)}


def _plain(linear: Weighted) -> Tensor:
    """The matrix as numbers; nothing is computed on the meta device."""
    method = linear.method
    if linear.device.type == "meta":
        return torch.empty(method.shape.outputs, method.shape.inputs, dtype=linear.dtype, device="meta")
    return method.dequantize().to(linear.dtype)


def _array(tensor: Tensor) -> Any:
    """The numbers of a tensor without a copy, or its shape."""
    tensor = tensor.detach()
    is_short = tensor.dtype == torch.bfloat16
    dtype = ml_dtypes.bfloat16 if is_short else np.dtype(str(tensor.dtype).removeprefix("torch."))
    if tensor.device.type == "meta":
        return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)
    tensor = tensor.contiguous()
    return tensor.view(torch.int16).numpy().view(dtype) if is_short else tensor.numpy()
