"""Attention through FlashInfer (`flashinfer-python`), which builds its kernels with nvcc when they are first used."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from kvern.attention.base import PlannedAttention
from kvern.device.device_batch import Queries
from kvern.device.transfer import upload
from kvern.kernels.attention_arguments import CachedLayer
from kvern.spec.mixers import AttentionSpec

WORKSPACE_BYTES = 256 << 20


class FlashInferKernels:
    """AttentionKernels out of FlashInfer's wrappers, one for each kind of layer.

    Raises ImportError where the package is missing, and whatever its build raises.
    """

    name = "flashinfer"
    captures = False

    def __init__(
        self, layers: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        import flashinfer

        self._layers = list(layers)
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._planned: torch.cuda.Event | None = None
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefills = {
            layer: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for layer in set(layers)
        }
        self._decodes = {
            layer: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=layer.heads // layer.kv_heads >= 4
            )
            for layer in set(layers)
        }

    def decode(self, queries: Queries) -> PlannedAttention:
        indptr, indices, last_page = self._pages(queries)

        def plan(layer: AttentionSpec) -> None:
            self._decodes[layer].plan(
                indptr,
                indices,
                last_page,
                layer.heads,
                layer.kv_heads,
                layer.head_dim,
                self._block_size,
                **self._of_layer(layer),
            )

        return self._plan(self._decodes, plan)

    def prefill(self, queries: Queries) -> PlannedAttention:
        indptr, indices, last_page = self._pages(queries)
        firsts = torch.tensor(list(accumulate(queries.counts, initial=0)), dtype=torch.int32)

        def plan(layer: AttentionSpec) -> None:
            self._prefills[layer].plan(
                firsts,
                indptr,
                indices,
                last_page,
                layer.heads,
                layer.kv_heads,
                layer.head_dim,
                self._block_size,
                causal=True,
                **self._of_layer(layer),
            )

        return self._plan(self._prefills, plan)

    def _of_layer(self, layer: AttentionSpec) -> dict[str, Any]:
        return {
            "sm_scale": layer.scale,
            "window_left": -1 if layer.window is None else layer.window - 1,
            "logits_soft_cap": layer.softcap,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }

    def _plan(self, wrappers: dict[AttentionSpec, Any], plan: Any) -> PlannedAttention:
        """Plan for each kind of layer. A plan is copied to the device from one buffer: the copy before must be done."""
        if self._planned is not None:
            self._planned.synchronize()
        for layer in wrappers:
            plan(layer)
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._planned.record()

        def run(layer: int, query: torch.Tensor, cached: CachedLayer, out: torch.Tensor) -> None:
            wrappers[self._layers[layer]].run(query, (cached.cache[0], cached.cache[1]), out=out)

        return run

    def _pages(self, queries: Queries) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the blocks with the keys: bounds of each request's run (on the host), the blocks (on the device), and
        the number of keys in its last block (on the host)."""
        keys = [start + count for start, count in zip(queries.starts, queries.counts, strict=True)]
        blocks = [-(-count // self._block_size) for count in keys]
        bounds = list(accumulate(blocks, initial=0))
        sent = upload([*queries.slots, *bounds[:-1], *blocks], torch.int64, self._device)
        slots, firsts, counts = sent.view(3, -1)
        request = torch.repeat_interleave(counts, output_size=bounds[-1])
        block = torch.arange(bounds[-1], device=self._device) - firsts[request]
        indices = queries.block_table[slots[request], block]
        last = [count - (pages - 1) * self._block_size for count, pages in zip(keys, blocks, strict=True)]
        return torch.tensor(bounds, dtype=torch.int32), indices, torch.tensor(last, dtype=torch.int32)
