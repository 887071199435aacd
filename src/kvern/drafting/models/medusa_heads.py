"""Medusa heads: each guesses one token, all of them from one state of a model, without a cache (Cai et al. 2024).

    the state that leads to token t + 1  ->  head 0  ->  scores of token t + 2
                                         ->  head 1  ->  scores of token t + 3, and so on

A head is a few residual layers, `x + silu(linear(x))`, and an output layer. No head knows what the others guess
(https://arxiv.org/abs/2401.10774, section 2.1). Checkpoints, by whom they are written:

    0.0.linear.*, 0.1.weight                                     its authors, in medusa_lm_head.pt or safetensors
    blocks.0.layers.0.*, lm_heads.0.weight, token_map            vLLM
    medusa_heads.0.medusa_layers.0.linear.*, *.0.lm_head.weight  TensorRT-LLM

The first number is the head's, the second that of its layer. Without output layers heads use the model's.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from kvern.drafting.models.head import DraftedTokens
from kvern.errors import UnsupportedModel
from kvern.layers.build import Build
from kvern.layers.embedding import make_head
from kvern.layers.linear import Linear
from kvern.layers.linear_format import LinearFormat
from kvern.layers.module import Module
from kvern.models.checkpoint import StoredTensor, read_headers
from kvern.models.decoder import Decoder
from kvern.models.hub import MEDUSA
from kvern.models.loader import filled_model, llama_name, read_config, stored_methods
from kvern.models.registry import Config
from kvern.models.torch_file import read_torch_file
from kvern.models.weighted import WeightedModel
from kvern.spec.model import ModelSpec, Rename


@dataclass(frozen=True)
class MedusaSpec:
    """`heads` for one model, each of so many residual `layers`.

    `bias`: these have one. Without output layers of their own (`own_output`) they ask the model's. `drafted`: so many
    tokens they may draft, which their checkpoint lists; None: all of the vocabulary.
    """

    heads: int
    layers: int
    bias: bool = True
    own_output: bool = True
    drafted: int | None = None


class MedusaHead(Module):
    """Scores what follows some tokens further on, from a state of the model."""

    def __init__(self, medusa: MedusaSpec, target: Decoder, model: ModelSpec, build: Build) -> None:
        super().__init__()
        size = model.hidden_size
        self._activate, self._add = build.ops.activation("silu"), build.ops.add
        self.residuals = nn.ModuleList(
            Linear(size, {"linear": size}, build.at(str(layer)), bias=medusa.bias) for layer in range(medusa.layers)
        )
        self._score: Callable[[Tensor], Tensor] = target.logits
        if medusa.own_output:
            self.lm_head = make_head(size, medusa.drafted or model.vocab_size, build)
            self._score = self.lm_head.scores

    def forward(self, states: Tensor) -> Tensor:
        """`[N, hidden]` -> float32 `[N, drafted tokens]`."""
        for layer in self.residuals:
            states = self._add(self._activate(layer(states)), states)
        return self._score(states)


class MedusaHeads(WeightedModel):
    """All heads of a model."""

    def __init__(self, medusa: MedusaSpec, target: Decoder, model: ModelSpec, build: Build) -> None:
        """`model`: sizes and names of the checkpoint; it has no layers."""
        super().__init__(model, build)
        top = replace(build, path="")
        places = range(medusa.heads)
        self.heads = nn.ModuleList(MedusaHead(medusa, target, model, top.at(f"heads.{place}")) for place in places)
        self.drafted = None
        if medusa.own_output and medusa.drafted is not None:
            self.drafted = DraftedTokens(medusa.drafted, model.vocab_size, top)

    @property
    def count(self) -> int:
        """The number of tokens that they draft."""
        return len(self.heads)

    def logits(self, states: Tensor, head: int) -> Tensor:
        """Returns the scores of a head after states `[N, hidden]` of the model: float32 `[N, vocabulary]`.

        Tokens that it never drafts have -inf.
        """
        scores: Tensor = self.heads[head](states)
        return scores if self.drafted is None else self.drafted(scores)


def _differences(token_ids: Tensor, model: ModelSpec) -> Tensor:
    return token_ids - torch.arange(len(token_ids), device=token_ids.device)


_RENAMES = (
    Rename(r"^(medusa_heads?\.|heads\.)?(?=\d|blocks\.|lm_heads\.)", ""),
    Rename(r"^(\d+)\.(?:medusa_layers\.)?(\d+)\.linear\.", r"heads.\1.\2.linear."),
    Rename(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"heads.\1.\2.linear."),
    Rename(r"^(?:(\d+)\.\d+|(\d+)\.lm_head|lm_heads\.(\d+))\.(?=weight$)", r"heads.\1\2\3.lm_head."),
    Rename(r"^token_map$", "d2t", _differences),
)
MOST = 64
"""Heads, and layers of each: beyond any that were trained."""
_OUTPUT = r"(lm_head|token_map|\d\.\d+\.weight)"
"""Tensors that are not read if heads use the model's output layer."""


def load_medusa(
    folder: Path,
    target: Decoder,
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    unquantized: LinearFormat | None = None,
) -> MedusaHeads:
    """Build the heads of a folder for `target`, in its precision and on its device, and load their weights.

    Options as those of `load_model`. Raises ModelNotFound, UnsupportedModel or CorruptCheckpoint.
    """
    config, stored = read_config(folder), None if load_format == "dummy" else _stored(folder)
    medusa = read_medusa(config, target.spec, stored)
    ignored = () if medusa.own_output else (_OUTPUT,)
    model = replace(
        target.spec, layers=(), renames=_RENAMES, ignored=ignored, tie_word_embeddings=False, draft_head=None
    )
    linear = stored_methods(config, model, stored or [], unquantized)
    build = replace(target.build, linear=linear)
    return filled_model(lambda model, build: MedusaHeads(medusa, target, model, build), model, build, folder, stored)


def _stored(folder: Path) -> list[StoredTensor]:
    saved = folder / MEDUSA
    return read_torch_file(saved) if saved.is_file() and not any(folder.glob("*.safetensors")) else read_headers(folder)


def read_medusa(config: Config, target: ModelSpec, stored: Sequence[StoredTensor] | None) -> MedusaSpec:
    """Returns the heads for `target` described by a `config.json` and its stored tensors (None without files).

    Published configurations name fewer heads than there are: those that are stored count. Raises UnsupportedModel.
    """
    heads = _count(config, "medusa_num_heads", "num_heads")
    layers = _count(config, "medusa_num_layers", "num_hidden_layers")
    own_output = not config.get("original_lm_head", False)
    if stored is None:
        drafted = config.get("truncated_vocab_size") or target.vocab_size
        drafted = None if drafted == target.vocab_size else drafted
        return MedusaSpec(heads, layers, own_output=own_output, drafted=drafted)
    named = {llama_name(tensor.name, _RENAMES)[0]: tensor.shape for tensor in stored}
    places = [re.match(r"heads\.(\d+)\.(\d+)\.linear\.", name) for name in named]
    found = [(int(place[1]), int(place[2])) for place in places if place is not None]
    heads = _checked("the files' number of heads", max([heads, *(head + 1 for head, _ in found)]))
    layers = _checked("the files' number of layers", max([layers, *(layer + 1 for _, layer in found)]))
    outputs = [shape for name, shape in named.items() if name.endswith(".lm_head.weight") and shape]
    drafted = math.prod(named["d2t"]) if "d2t" in named else None
    own_output = own_output and bool(outputs)
    width = next((shape[-1] for name, shape in named.items() if name.endswith(".linear.weight") and shape), None)
    if width is not None and width != target.hidden_size:
        raise UnsupportedModel(
            f"the Medusa heads read states of {width} numbers, and the model's have {target.hidden_size}"
        )
    if own_output and drafted is None and outputs[0][0] != target.vocab_size:
        raise UnsupportedModel(
            f"the Medusa heads are for a vocabulary of {outputs[0][0]} tokens, and the model has {target.vocab_size}"
        )
    bias = any(name.endswith(".linear.bias") for name in named)
    return MedusaSpec(heads, layers, bias, own_output, drafted)


def _count(config: Config, *names: str) -> int:
    """The first of these that a configuration has. Raises UnsupportedModel."""
    return _checked(*next(((name, config[name]) for name in names if name in config), (names[0], None)))


def _checked(name: str, count: object) -> int:
    if type(count) is not int or not 1 <= count <= MOST:
        raise UnsupportedModel(f"{name} is {count!r:.60}: it must be from 1 to {MOST} for Medusa heads")
    return count
