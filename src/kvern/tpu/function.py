"""One step of a model as a pure function: a prompt's chunk or the next token of each row, over a paged KV cache."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import LayerSpec, MlpSpec, ModelSpec, RopeSpec
from kvern.tpu.attention import Rows, lanes_of, precision_of, write
from kvern.tpu.weights import Weights

Attention = Callable[[AttentionSpec, Array, Array, Rows], Array]
"""`(layer, query [R, Q, heads, head_dim], cache, rows) -> [R, Q, heads, head_dim]`, see `kvern.tpu.attention`."""


def cache_shape(spec: AttentionSpec, blocks: int, block_size: int) -> tuple[int, ...]:
    """The shape of one layer's cache."""
    return blocks, 2, spec.kv_heads, block_size, lanes_of(spec.head_dim)


def make_step(spec: ModelSpec, max_model_len: int, attend: Attention) -> Callable[..., tuple[Array, list[Array]]]:
    """The function `(weights, caches, tokens [R, Q], rows) -> (logits [R, vocab] float32, caches)`.

    It writes the keys and values of each row's tokens, and gives the logits of its last one. `caches` has an array for
    each layer, and the function may overwrite it. `max_model_len`: the longest sequence, on which scalings depend.
    """

    def step(weights: Weights, caches: Sequence[Array], tokens: Array, rows: Rows) -> tuple[Array, list[Array]]:
        hidden = jnp.asarray(weights["embed"])[tokens]
        positions = rows.starts[:, None] + jnp.arange(tokens.shape[1])
        turns = {
            rope: rotation(rope, positions, max_model_len, hidden.dtype)
            for rope in {layer.rope for layer in spec.layers}
            if rope is not None
        }
        written = []
        for layer, own, cache in zip(spec.layers, weights["layers"], caches, strict=True):
            turn = None if layer.rope is None else turns[layer.rope]
            hidden, cache = _layer(spec, layer, own, attend, (hidden, cache, rows, turn))
            written.append(cache)
        last = jnp.maximum(rows.counts - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
        hidden = _norm(hidden, weights["norm"], spec.norm.epsilon)
        head = weights.get("head", {"weight": weights["embed"]})
        return _product(hidden, head).astype(jnp.float32), written

    return step


def _layer(
    spec: ModelSpec, layer: LayerSpec, weights: Weights, attend: Attention, state: tuple[Array, Array, Rows, Any]
) -> tuple[Array, Array]:
    """The residual `[R, Q, hidden]` and the cache after a layer; `state`: those before it, rows, and rotation."""
    hidden, cache, rows, turn = state
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, MlpSpec)
    normal = _norm(hidden, weights["attention_norm"], spec.norm.epsilon)
    heads = _product(normal, weights["qkv"]).reshape(*hidden.shape[:2], -1, attention.head_dim)
    both, value = jnp.split(heads, [attention.heads + attention.kv_heads], axis=2)
    if spec.query_key_norm is not None:
        both = _norm(both, weights["head_norm"], spec.query_key_norm.norm.epsilon)
    if layer.rope is not None:
        both = rotated(both, layer.rope, *turn)
    query, key = jnp.split(both, [attention.heads], axis=2)
    cache = write(cache, key, value, rows)
    attended = attend(attention, query, cache, rows).reshape(*hidden.shape[:2], -1)
    hidden = hidden + _product(attended, weights["output"])
    normal = _norm(hidden, weights["mlp_norm"], spec.norm.epsilon)
    gate, up = jnp.split(_product(normal, weights["gate_up"]), [mlp.width], axis=-1)
    return hidden + _product(jax.nn.silu(gate) * up, weights["down"]), cache


def _norm(x: Array, weight: Array, epsilon: float) -> Array:
    """The root-mean-square norm over the last dimension, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon) * weight).astype(x.dtype)


def _product(x: Array, linear: Weights) -> Array:
    """`x [..., inputs]` times `weight [outputs, inputs]`."""
    weight = jnp.asarray(linear["weight"])
    out = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision_of(x.dtype))
    return out + linear["bias"] if "bias" in linear else out


def rotation(rope: RopeSpec, positions: Array, max_model_len: int, dtype: Any) -> tuple[Array, Array]:
    """Cosines and sines of the planes, `[R, Q, 1, dim / 2]` in the model's dtype."""
    inverse, factor = rope.scaling.frequencies(rope.theta, rope.dim, max_model_len)
    angles = positions[:, :, None, None].astype(jnp.float32) * jnp.array(inverse, jnp.float32)
    return (jnp.cos(angles) * factor).astype(dtype), (jnp.sin(angles) * factor).astype(dtype)


def rotated(x: Array, rope: RopeSpec, cosine: Array, sine: Array) -> Array:
    """The first `dim` entries of each head, turned in pairs of neighbours or of halves."""
    turned, rest = x[..., : rope.dim], x[..., rope.dim :]
    if rope.interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    parts = first * cosine - second * sine, second * cosine + first * sine
    both = jnp.stack(parts, -1).reshape(turned.shape) if rope.interleaved else jnp.concatenate(parts, -1)
    return jnp.concatenate([both, rest], -1)
