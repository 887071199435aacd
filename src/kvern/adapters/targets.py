"""What of a decoder can be adapted: its linear layers, by the names that a Llama-style checkpoint gives them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from kvern.device.ranks import Share
from kvern.layers.linear import Linear


@dataclass(frozen=True)
class Target:
    """One part of a linear layer: `layer` is its path in the decoder, `part` the name of the checkpoint's module.

    `outputs`, which lie one behind the other, and `inputs`: those of the checkpoint, and which of them are here.
    """

    layer: str
    part: str
    outputs: Sequence[Share]
    inputs: Share

    @property
    def width(self) -> int:
        """How many outputs the checkpoint has."""
        return sum(share.whole for share in self.outputs)

    @property
    def key(self) -> str:
        return f"{self.layer}/{self.part}"


def linear_layers(decoder: nn.Module) -> Iterator[tuple[str, Linear]]:
    """The linear layers of the decoder's blocks, with their paths."""
    for path, module in decoder.named_modules():
        if path.startswith("layers.") and isinstance(module, Linear):
            yield path, module


def targets_of(decoder: nn.Module) -> dict[str, tuple[Target, ...]]:
    """By the names of a checkpoint's modules, fused ones beside their parts: "model.layers.0.self_attn.q_proj"."""
    targets: dict[str, tuple[Target, ...]] = {}
    for path, linear in linear_layers(decoder):
        prefix = f"model.{path.rpartition('.')[0]}."
        parts = [Target(path, part, *linear.shares(part)) for part in linear.outputs]
        targets |= {prefix + target.part: (target,) for target in parts}
        if linear.fused is not None:
            targets[prefix + linear.fused] = tuple(parts)
    return targets
