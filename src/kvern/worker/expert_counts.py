"""How many tokens each expert of a model has had: read from the device without waiting for it."""

from collections.abc import Callable
from itertools import islice

import torch

from kvern.device.transfer import reader
from kvern.layers.experts import Experts
from kvern.models.decoder import Decoder, LanguageModel

LayerCounts = list[list[int]]
"""For each layer the tokens of each of its experts; none of a layer without any."""


def experts_of(model: LanguageModel) -> list[Experts | None]:
    """Those of each layer that kvern computes."""
    layers = model.layers if isinstance(model, Decoder) else ()
    return [next((part for part in layer.modules() if isinstance(part, Experts)), None) for layer in layers]


class ExpertCounts:
    """Of all steps since `reset`; tokens that fill a batch up are counted as well."""

    def __init__(self, model: LanguageModel) -> None:
        counts = [None if experts is None else experts.expert_counts for experts in experts_of(model)]
        self._sizes = [0 if count is None else len(count) for count in counts]
        self._counts = [count for count in counts if count is not None]

    def reset(self) -> None:
        """What steps have counted so far was no request's."""
        for count in self._counts:
            count.zero_()

    def read(self) -> Callable[[], LayerCounts]:
        """Begin to read; what is returned waits for the steps so far. All layers are empty if none has experts."""
        if not self._counts:
            return list
        read = reader(torch.cat(self._counts))

        def by_layer() -> LayerCounts:
            numbers = iter(read())
            return [list(islice(numbers, size)) for size in self._sizes]

        return by_layer
