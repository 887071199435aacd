"""Medusa heads: each guesses one token, all of them from one state of a model, without a cache (Cai et al. 2024).

    the state that leads to token t + 1  ->  head 0  ->  scores of token t + 2
                                         ->  head 1  ->  scores of token t + 3, and so on

A head is a few residual layers, `x + silu(linear(x))`, and an output layer. No head knows what the others guess. What
checkpoints call their parts, `drafting/models/medusa_formats.py` knows (https://arxiv.org/abs/2401.10774, section 2.1).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from kvern.drafting.models.head import DraftedTokens
from kvern.layers.build import Build
from kvern.layers.embedding import make_head
from kvern.layers.linear import Linear
from kvern.layers.module import Module
from kvern.models.decoder import Decoder
from kvern.models.weighted import WeightedModel
from kvern.spec.model import ModelSpec


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
