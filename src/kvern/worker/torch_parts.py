"""A worker whose steps run through PyTorch alone: on CPUs, and on GPUs where Triton or its kernels do not work."""

import torch

from kvern.attention.torch_sdpa import TorchAttention
from kvern.device.rows import BatchRows
from kvern.layers.unquantized import Unquantized
from kvern.model_spec import ModelSpec
from kvern.models.decoder import Decoder
from kvern.structured.masks import restrict
from kvern.worker.contents import Contents
from kvern.worker.memory import DeviceMemory, bytes_of_token, cache_bytes
from kvern.worker.plan import Layout, Plan, Room
from kvern.worker.runner import ModelRunner


class TorchParts:
    """The `Parts` of a worker without kernels."""

    restrict = staticmethod(restrict)

    def __init__(self, spec: ModelSpec, plan: Plan, memory: DeviceMemory) -> None:
        self._spec, self._plan, self._memory = spec, plan, memory
        self.unquantized = Unquantized()

    def prepare(self, decoder: Decoder) -> None:
        """Nothing is chosen."""

    def room(self, contents: Contents) -> Room:
        """What the device's memory has left."""
        token_bytes = bytes_of_token(self._spec, getattr(torch, self._plan.cache_dtype))
        return Room(cache_bytes(self._memory, token_bytes), token_bytes)

    def runner(self, contents: Contents, layout: Layout) -> ModelRunner:
        """The runner over a KV cache of this layout."""
        layers = [layer.attention for layer in self._spec.layers]
        dtype, size, device = getattr(torch, layout.dtype), layout.block_size, self._memory.device
        attention = TorchAttention(layers, layout.blocks, size, dtype, device, contents.eight_bit)
        rows = BatchRows(layout.max_batch_requests, layout.max_model_len, -(-layout.max_model_len // size), device)
        return ModelRunner(
            contents.decoder, attention, rows, size, contents.grammars, contents.processors, contents.adapters
        )
