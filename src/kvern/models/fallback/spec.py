"""The description of a model that transformers computes."""

from dataclasses import dataclass

from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import ModelSpec


@dataclass(frozen=True)
class TransformersSpec(ModelSpec):
    """The description of a model that transformers computes; it has no `layers`.

    `calls` are the attentions of one forward pass, in order. `parameters` is the number of all weights.
    """

    calls: tuple[AttentionSpec, ...] = ()
    parameters: int = 0

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attentions, each of which has its own keys and values."""
        return self.calls

    @property
    def caching_layers(self) -> tuple[int, ...]:
        """The places of the attentions: each stores its keys and values."""
        return tuple(range(len(self.calls)))
