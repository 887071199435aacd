"""The calibration's hidden states on their way through the layers, with one block on the device at a time.

walk = Walk(checkpoint, rows)             rows [N, L] int64: embedded
for index in range(walk.layers):
    block = walk.block(index)             its weights, in their dtype, on the device
    walk.observe(block, products=True)    runs it: block.inputs[path] are statistics of each matrix's inputs
    block.tensors[path] = ...             other weights, laid out as in the checkpoint
    walk.advance(block)                   runs it with these: the inputs of the next block
"""

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.block import Places, SequentialLayer, block_class
from kvern.layers.latent_attention import LatentExpansion
from kvern.layers.rope import RopeTable, positions_alone
from kvern.layers.states import new_states
from kvern.layers.step_context import Attend, StepContext
from kvern.models.decoder import Decoder
from kvern.quantize.checkpoint import WEIGHT, Checkpoint, Piece, load_into
from kvern.quantize.watched import Inputs, places
from kvern.spec.mixers import AttentionSpec, RecurrentSpec
from kvern.spec.model import LayerSpec, ModelSpec

BATCH_TOKENS = 4096
"""Tokens that run through a block at a time."""


class CausalAttend:
    """Attention of whole rows of `length` tokens that begin at position 0, of any number of them, without a cache."""

    def __init__(self, spec: AttentionSpec, length: int) -> None:
        self._spec, self._length = spec, length

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query [T, heads, head_dim]`, `key [T, kv_heads, head_dim]`, `value [T, kv_heads, D]` -> `[T, heads, D]`."""
        spec = self._spec
        query, key, value = (x.view(-1, self._length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        if spec.softcap is None and (spec.window is None or spec.window >= self._length):
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=spec.scale, enable_gqa=spec.heads != spec.kv_heads
            )
        else:
            out = self._masked(query, key, value)
        return out.transpose(1, 2).flatten(0, 1)

    def _masked(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec = self._spec
        places = torch.arange(self._length, device=query.device)
        behind = places[:, None] - places
        hidden = (behind < 0) | (behind >= (spec.window or self._length))
        key, value = (x.repeat_interleave(spec.heads // spec.kv_heads, 1) for x in (key, value))
        scores = (query @ key.transpose(-1, -2)).float() * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        return scores.masked_fill_(hidden, float("-inf")).softmax(-1).to(value.dtype) @ value


class LayersAttend:
    """Attention of whole rows, each layer with its own window and scale."""

    def __init__(self, spec: ModelSpec, length: int) -> None:
        self._layers = [CausalAttend(attention, length) for attention in spec.attentions]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._layers[layer](layer, query, key, value)


class Block:
    """One layer on the device.

    `tensors` are its weights by Llama's names, "model.layers.3.mlp.down_proj.weight", laid out as in the checkpoint; a
    change replaces the tensor. `inputs`, by the same names, are the statistics of the matrices' inputs after an
    observation; matrices with the same inputs share them.
    """

    def __init__(self, index: int, checkpoint: Checkpoint, module: SequentialLayer) -> None:
        self.index = index
        self.checkpoint = checkpoint
        self.module = module
        self.prefix = f"model.layers.{index}"
        self.pieces: list[Piece] = checkpoint.of_layer(index)
        self.tensors: dict[str, Tensor] = {
            piece.path: checkpoint.read(piece).to(checkpoint.device) for piece in self.pieces
        }
        self.inputs: dict[str, Inputs] = {}
        self.load()

    def load(self) -> None:
        """Loads `tensors` into the layer."""
        load_into(self.module, self.pieces, self.tensors, self.checkpoint)
        for part in self.module.modules():
            if isinstance(part, LatentExpansion):
                part.divide()

    def weight(self, path: str) -> Tensor:
        """The matrix of that name, on the device, in float32."""
        return self.tensors[path].to(self.checkpoint.device, torch.float32)


class Walk:
    """Rows of tokens `[N, L]` int64 through a model, layer by layer; `hidden [N, L, hidden]` is where they are."""

    def __init__(self, checkpoint: Checkpoint, rows: Tensor) -> None:
        self.checkpoint, self.layers = checkpoint, len(checkpoint.spec.layers)
        self._length = rows.shape[1]
        self._build = checkpoint.build(self._length)
        self._positions = torch.arange(self._length, device=checkpoint.device)
        with torch.no_grad():
            embedded: Tensor = self.ends().embed_tokens(rows.to(checkpoint.device).flatten())
        self.hidden = embedded.view(*rows.shape, -1)

    def ends(self) -> Decoder:
        """The model without layers: embeddings, last norm and head, on the device."""
        decoder = Decoder(replace(self.checkpoint.spec, layers=()), self._build)
        pieces = self.checkpoint.of_layer(None)
        load_into(decoder, pieces, {piece.path: self.checkpoint.read(piece) for piece in pieces}, self.checkpoint)
        return decoder

    def block(self, index: int) -> Block:
        """A layer with its weights. The one before should be gone: two may not fit."""
        spec = self.checkpoint.spec
        layer = spec.layers[index]
        make = block_class(spec, layer, self._build)
        return Block(index, self.checkpoint, make(Places(0, 0), spec, layer, self._build.at(f"layers.{index}")))

    def observe(self, block: Block, *, products: bool = False) -> None:
        """Runs a block on all rows for the statistics of its inputs; `products`: X^T X too."""
        watched = list(places(block.module))
        batches = -(-len(self.hidden) // self._batch)
        for place in watched:
            inputs = Inputs(place.inputs, batches, self.checkpoint.device, products=products)
            block.inputs |= {f"{path}{WEIGHT}": inputs for path in place.paths if f"{path}{WEIGHT}" in block.tensors}
            place.watch(inputs)
        for first in range(0, len(self.hidden), self._batch):
            self.run(block, self.hidden[first : first + self._batch])
        for place in watched:
            place.watch(None)

    def advance(self, block: Block) -> None:
        """Runs a block with its current weights and keeps its outputs as the next inputs."""
        block.load()
        for first in range(0, len(self.hidden), self._batch):
            rows = slice(first, first + self._batch)
            self.hidden[rows] = self.run(block, self.hidden[rows])

    def through(self, block: Block, hidden: Tensor) -> Tensor:
        """Runs a block on any number of rows `[N, L, hidden]`."""
        return torch.cat([self.run(block, rows) for rows in torch.split(hidden, self._batch)])

    @property
    def _batch(self) -> int:
        return max(1, BATCH_TOKENS // self._length)

    def _step(self, layer: LayerSpec, rows: int) -> StepContext:
        """The context of a layer for `rows` rows, each computed from its first token."""
        positions, build = self._positions.repeat(rows), self._build
        rotation = positions_alone(positions) if layer.rope is None else RopeTable(layer.rope, build)(positions)
        attend: Attend | None = None
        states = None
        for mixer in layer.mixers:
            if isinstance(mixer, RecurrentSpec):
                states = new_states([mixer], [self._length] * rows, build.dtype, build.device)
            else:
                spec = mixer if isinstance(mixer, AttentionSpec) else mixer.over_latents
                attend = CausalAttend(spec, self._length)
        return StepContext(rotation, cast("Attend", attend), states)

    @torch.no_grad()
    def run(self, block: Block, hidden: Tensor) -> Tensor:
        """Runs a block on rows `[n, L, hidden]`."""
        layer = self.checkpoint.spec.layers[block.index]
        flat = hidden.flatten(0, 1).clone()
        flat, update = block.module(flat, None, self._step(layer, len(hidden)))
        out: Tensor = flat if update is None else flat + update
        return out.view(hidden.shape)
