"""Compiles the kernels that a model needs, in parallel, before its weights are there; names those that work.

Each is launched once on small inputs with the head sizes, widths and dtype of the model, so that what serving launches
is compiled already. A kernel that does not compile or run is left to PyTorch, with a warning that names it.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from kvern.kernels import activation, adapters, attention, batch, linear, moe, norm, rotary, sampling
from kvern.layers.few_rows import matvec_shape
from kvern.layers.tuned_linear import CANDIDATES
from kvern.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec

logger = logging.getLogger("kvern")

THREADS = 8
ROWS = 64
PROCESSORS = 132

Launch = Callable[[], object]


class KernelLaunches:
    """One launch of every kernel in every form that a model of this description uses."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, block_size: int, device: torch.device, adapter_rank: int = 0
    ) -> None:
        """`adapter_rank`: the highest of an adapter; 0: there are none."""
        self.spec, self.dtype, self.block_size, self.device = spec, dtype, block_size, device
        self.adapter_rank = adapter_rank

    def all(self) -> dict[str, list[Launch]]:
        """By the name of what they are part of."""
        layers = set(self.spec.layers)
        mlps = {layer.mlp for layer in layers if isinstance(layer.mlp, MlpSpec) and layer.mlp.gated}
        mlps = {mlp for mlp in mlps if mlp.activation in activation.ACTIVATIONS}
        moes = {layer.mlp for layer in layers if isinstance(layer.mlp, MoeSpec)}
        return {
            "batch": list(self._batch()),
            "sampling": [partial(self._sample, filtered) for filtered in (False, True)],
            "norm": list(self._norm()) if self.spec.norm.kind == "rms" else [],
            "rotary": [partial(self._rotate, layer, tokens) for layer in layers for tokens in (1, ROWS)],
            "activation": [partial(self._activate, mlp) for mlp in mlps],
            "few_rows": [launch for mlp in mlps for launch in self._matvecs(mlp)],
            "moe": [partial(self._moe, item, tokens) for item in moes for tokens in (1, 16, 256)],
            "attention": [launch for item in {layer.attention for layer in layers} for launch in self._attention(item)],
            "linear": list(self._linear()),
            "adapters": list(self._adapters()) if self.adapter_rank else [],
        }

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype or self.dtype, device=self.device)

    def _integers(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def _batch(self) -> Iterable[Launch]:
        tokens, table = self._integers(2, 64), self._integers(2, 16)
        ones, zeros = self._integers(1) + 1, self._integers(1)
        long = self._integers(1, dtype=torch.int64)
        size = self.block_size
        yield lambda: batch.read_tokens(tokens, table, zeros, zeros, zeros, ones, 1, 1, size)
        yield lambda: batch.read_decodes(tokens, table, zeros, zeros, size)
        yield lambda: batch.write_sampled(tokens, zeros, long, long, self._integers(1))
        yield lambda: batch.write_sampled(tokens, long, long, long)
        yield lambda: batch.write_runs(table, self._integers(1, 4), self._integers(8))

    def _sample(self, filtered: bool) -> object:
        numbers = [self._empty(2, dtype=torch.float32) + 1 for _ in range(3)]
        long = self._integers(2, dtype=torch.int64)
        logits = self._empty(2, self.spec.vocab_size)
        temperature, top_p, min_p = numbers
        return sampling.sample(
            logits, self._integers(2), long, temperature, long, top_p, min_p, long, filtered=filtered
        )

    def _norm(self) -> Iterable[Launch]:
        x, update = self._empty(ROWS, self.spec.hidden_size), self._empty(ROWS, self.spec.hidden_size)
        weight = self._empty(self.spec.hidden_size, dtype=torch.float32 if self.spec.norm.offset else None)
        yield lambda: norm.rms_norm(x, weight, 1e-6)
        yield lambda: norm.add_rms_norm(x, update, weight, 1e-6)

    def _cache(self, spec: AttentionSpec) -> torch.Tensor:
        return self._empty(2, 8, self.block_size, spec.kv_heads, spec.head_dim)

    def _rotate(self, layer: LayerSpec, tokens: int) -> object:
        spec = layer.attention
        query_key_norm = self.spec.query_key_norm
        return rotary.rotate_and_store(
            self._empty(tokens, (spec.heads + 2 * spec.kv_heads) * spec.head_dim),
            self._integers(tokens, dtype=torch.int64),
            self._integers(tokens, dtype=torch.int64),
            None if layer.rope is None else self._empty(8, 2, 1, layer.rope.dim),
            self._cache(spec),
            query_heads=spec.heads,
            interleaved=layer.rope is not None and layer.rope.interleaved,
            norm_weight=None
            if query_key_norm is None
            else self._empty(spec.heads + spec.kv_heads, spec.head_dim, dtype=torch.float32),
            epsilon=1e-6,
        )

    def _activate(self, mlp: MlpSpec) -> object:
        return activation.gated_activation(self._empty(ROWS, 2 * mlp.width), mlp.activation)

    def _matvecs(self, mlp: MlpSpec) -> Iterable[Launch]:
        hidden = self.spec.hidden_size
        gain = self._empty(hidden, dtype=torch.float32 if self.spec.norm.offset else None)
        spec = self.spec.layers[0].attention
        heads, columns = (spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.heads * spec.head_dim
        for outputs, inputs, around in (
            (heads, hidden, linear.Around(gain, 1e-6)),
            (2 * mlp.width, hidden, linear.Around(gain, 1e-6, mlp.activation)),
            (hidden, columns, linear.Around(residual=self._empty(1, hidden))),
            (hidden, mlp.width, linear.Around(residual=self._empty(1, hidden))),
        ):
            shape = matvec_shape(outputs, inputs, around.activation is not None)
            x, weight = self._empty(1, inputs), self._empty(outputs, inputs)
            yield partial(linear.matvec, x, weight, None, shape, around)

    def _moe(self, spec: MoeSpec, tokens: int) -> object:
        hidden = self.spec.hidden_size
        logits = self._empty(tokens, spec.experts)
        weights, chosen = moe.route(logits, spec.top_k, spec.renormalize, spec.routed_scale)
        if spec.activation not in moe.ACTIVATIONS:
            return weights
        gate_up, down = self._empty(spec.experts, 2 * spec.width, hidden), self._empty(spec.experts, hidden, spec.width)
        return moe.fused_experts(self._empty(tokens, hidden), gate_up, down, weights, chosen, spec.activation)

    def _attention(self, spec: AttentionSpec) -> Iterable[Launch]:
        cache, table = self._cache(spec), self._integers(2, 16)
        zeros, ones = self._integers(2), self._integers(2) + 1
        of_model: dict[str, Any] = {"scale": spec.scale, "window": spec.window, "softcap": spec.softcap}
        for requests in (1, 256):
            decode = partial(attention.decode_attention, **of_model)
            shape = attention.decode_shape(requests, spec.kv_heads, spec.head_dim, PROCESSORS)
            query, arrived = self._empty(2, spec.heads, spec.head_dim), self._integers(2 * spec.kv_heads)
            for rows in (zeros, zeros.long()):
                yield partial(decode, query, cache, table, rows, rows, arrived, torch.empty_like(query), shape)
        for long in (False, True):
            prefill = partial(attention.prefill_attention, **of_model)
            query, out = self._empty(2, spec.heads, spec.head_dim), self._empty(2, spec.heads, spec.head_dim)
            tiles = attention.prefill_shape(spec.head_dim, long)
            yield partial(prefill, query, cache, table, zeros, zeros, zeros, ones, zeros, zeros, out, tiles)

    def _linear(self) -> Iterable[Launch]:
        hidden = self.spec.hidden_size
        weight, arrived = self._empty(256, hidden), self._integers(256)
        for rows, shapes in CANDIDATES.items():
            x = self._empty(rows, hidden)
            for shape in shapes:
                if isinstance(shape, linear.MatvecShape):
                    yield partial(linear.matvec, x, weight, None, shape)
                elif shape is not None:
                    yield partial(linear.small_matmul, x, weight, None, shape, arrived)

    def _adapters(self) -> Iterable[Launch]:
        hidden, rank = self.spec.hidden_size, -(-self.adapter_rank // adapters.CHUNK) * adapters.CHUNK
        for parts in (1, 2, 3):
            down, up = self._empty(1, parts, rank, hidden), self._empty(1, rank, parts * hidden)
            ends = tuple(hidden * (part + 1) for part in range(parts))
            for rows in (1, 32, 64, adapters.SPLIT_ROWS):
                x, out = self._empty(rows, hidden), self._empty(rows, parts * hidden)
                slots, ranks = self._integers(rows, dtype=torch.int64), self._integers(1)
                yield partial(adapters.add_adapters, out, x, slots, down, up, ranks, ends)


def working_kernels(
    spec: ModelSpec, dtype: torch.dtype, block_size: int, device: torch.device, adapter_rank: int = 0
) -> frozenset[str]:
    """Launch every kernel once and return the names of the parts all of whose kernels work on this device."""
    launches = KernelLaunches(spec, dtype, block_size, device, adapter_rank).all()
    use = partial(torch.cuda.set_device, device) if device.type == "cuda" else None  # a thread begins at the first
    with ThreadPoolExecutor(THREADS, initializer=use) as pool:
        running = {name: [pool.submit(launch) for launch in items] for name, items in launches.items()}
        broken = {}
        for name, futures in running.items():
            errors = [error for future in futures if (error := future.exception()) is not None]
            if errors:
                broken[name] = errors[0]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for name, error in broken.items():
        reason = (str(error) or type(error).__name__).splitlines()[0]
        logger.warning("the kernels for %s do not work here, PyTorch does their work: %s", name, reason)
    return frozenset(launches) - frozenset(broken)
