"""The linear layers of a decoder that adapters can change, by their names in a Llama-style checkpoint."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvern.layers.linear import Linear
from kvern.models.decoder import Decoder
from kvern.ranks.ranks import Share


@dataclass(frozen=True)
class Target:
    """One part of a linear layer: `layer` is its path in the model, `part` the name of the checkpoint's module.

    `outputs`, in consecutive runs, and `inputs` give the sizes in the checkpoint and the ranges that this rank holds.
    """

    layer: str
    part: str
    outputs: Sequence[Share]
    inputs: Share

    @property
    def width(self) -> int:
        """The number of outputs in the checkpoint."""
        return sum(share.whole for share in self.outputs)

    @property
    def key(self) -> str:
        return f"{self.layer}/{self.part}"


def linear_layers(decoder: Decoder) -> Iterator[tuple[str, Linear]]:
    """The linear layers of the decoder's blocks, with their paths in the model, of which it may be one stage."""
    for place, layer in enumerate(decoder.layers, decoder.build.ranks.stage.first_layer):
        for path, module in layer.named_modules():
            if isinstance(module, Linear):
                yield f"layers.{place}.{path}", module


def targets_of(decoder: Decoder) -> dict[str, tuple[Target, ...]]:
    """The targets by the names of a checkpoint's modules, both fused ones and their parts."""
    targets: dict[str, tuple[Target, ...]] = {}
    for path, linear in linear_layers(decoder):
        prefix = f"model.{path.rpartition('.')[0]}."
        parts = [Target(path, part, *linear.shares(part)) for part in linear.outputs]
        targets |= {prefix + target.part: (target,) for target in parts}
        if linear.fused is not None:
            targets[prefix + linear.fused] = tuple(parts)
    return targets
