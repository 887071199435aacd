"""Counts of the tokens of each expert, read from the device without waiting for it."""

from collections.abc import Callable
from itertools import islice

import torch

from kvern.device.transfer import reader
from kvern.layers.experts import Experts
from kvern.models.decoder import Decoder, LanguageModel
from kvern.ranks.stages import Stage
from kvern.spec.model import ModelSpec

LayerCounts = list[list[int]]
"""For each layer the tokens of each of its experts; none of a layer without any."""


def experts_of(model: LanguageModel) -> dict[int, Experts]:
    """The experts that are computed here, by the places of their layers in the whole model."""
    if not isinstance(model, Decoder):
        return {}
    layers = enumerate(model.layers, model.build.ranks.stage.first_layer)
    return {place: part for place, layer in layers for part in layer.modules() if isinstance(part, Experts)}


class ExpertCounts:
    """Counts of all steps since `reset`; tokens that fill a batch up are counted as well.

    `model` has the layers of a `stage` of the `whole` model. All stages read between the same steps.
    """

    def __init__(self, model: LanguageModel, whole: ModelSpec, stage: Stage, device: torch.device) -> None:
        mixtures = [layer.mixture for layer in whole.layers]
        self._sizes = [0 if mixture is None else mixture.experts for mixture in mixtures]
        self._counts = [experts.expert_counts for experts in experts_of(model).values()]
        self._stage = stage
        self._earlier = torch.empty(sum(self._sizes[: stage.first_layer]), dtype=torch.int64, device=device)
        """The counts of the stages before."""

    def reset(self) -> None:
        """Forget the counts so far: those steps were no request's."""
        for count in self._counts:
            count.zero_()

    def read(self) -> Callable[[], LayerCounts]:
        """Begin to read; what is returned waits for the steps so far, and tells the last stage of all layers.

        They are empty if none has experts.
        """
        if len(self._earlier):
            self._stage.receive(self._earlier)
        counts = torch.cat([self._earlier, *self._counts])
        if not len(counts):
            return list
        if not self._stage.is_last:
            self._stage.send(counts)
            return list
        read = reader(counts)

        def by_layer() -> LayerCounts:
            numbers = iter(read())
            return [list(islice(numbers, size)) for size in self._sizes]

        return by_layer
