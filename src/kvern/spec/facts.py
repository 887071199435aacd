"""The facts of a model that requests depend on, for processes that do not build it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kvern.spec.model import ModelSpec


class ModelFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields of a ModelSpec of these names, whether it is an encoder's, and whether images are read here.

    `longest_span`: the most tokens of a span, as a step computes. `padded`: see EncoderSpec.
    """

    vocab_size: int = 0
    generates: bool = True
    is_classifier: bool = False
    model_type: str = ""
    is_encoder: bool = False
    reads_images: bool = False
    longest_span: int = 0
    padded: int = 0

    @classmethod
    def of(cls, spec: ModelSpec, reads_images: bool = False, longest_span: int = 0) -> ModelFacts:
        own = spec.vocab_size, spec.generates, spec.is_classifier, spec.model_type
        padded = 0 if spec.encoder is None else spec.encoder.padded
        return cls(*own, spec.encoder is not None, reads_images, longest_span, padded)
