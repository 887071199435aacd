"""The experts of a mixture over ranks: counts of their tokens, when they are placed anew, and how they move.

The first rank decides by the tokens that experts have had. They change their places between steps, and all ranks hand
each other weights in the same order.
"""

import logging
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple
from zlib import crc32

import torch

from kvern.device.transfer import reader
from kvern.errors import ConfigError
from kvern.layers.experts import Experts
from kvern.models.decoder import Decoder, LanguageModel
from kvern.ranks.expert_placement import Placement, kept_in_place, place_experts, rank_loads
from kvern.ranks.ranks import Ranks
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


logger = logging.getLogger("kvern")

LEAST_GAIN = 0.05
"""The least share of the busiest rank's work in a layer for which experts are moved."""


class ExpertBalance:
    """Looks every so many `seconds` at what experts have had since it looked last, then has a layer for each step.

    `placements` are those of the layers whose experts are placed.
    """

    def __init__(
        self, placements: Mapping[int, Placement], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._placements = dict(placements)
        self._seconds = seconds
        self._clock = clock
        self._seen: LayerCounts = []
        self._loads: list[tuple[int, list[int]]] = []
        """Layers that were looked at, and not yet decided."""
        self._next = clock() + seconds

    def due(self, count: Callable[[], Callable[[], LayerCounts]]) -> dict[int, Placement]:
        """The layer whose experts are to be placed anew before the next step, which is taken for done; mostly none.

        `count` as `Executor.count_experts`.
        """
        if not self._loads:
            now = self._clock()
            if now < self._next:
                return {}
            self._next = now + self._seconds
            self._look(count())
        layer, load = self._loads.pop()
        old = self._placements[layer]
        new = kept_in_place(old, place_experts(load, len(old), sum(map(len, old)) - len(load)))
        before, after = max(rank_loads(old, load)), max(rank_loads(new, load))
        if not before or after > (1 - LEAST_GAIN) * before:
            return {}
        logger.info("layer %d: experts change their places, the busiest rank has %.0f%%", layer, 100 * after / before)
        self._placements[layer] = new
        return {layer: new}

    def _look(self, read: Callable[[], LayerCounts]) -> None:
        counts, seen = read(), self._seen
        self._seen = counts
        for layer in self._placements:
            earlier = seen[layer] if seen else [0] * len(counts[layer])
            load = [now - before for now, before in zip(counts[layer], earlier, strict=True)]
            self._loads.append((layer, load))


class Move(NamedTuple):
    """An expert that the rank `target` has not, into a slot of its, from one that has it."""

    source: int
    source_slot: int
    target: int
    target_slot: int


def moves_between(old: Placement, new: Placement) -> list[Move]:
    """The moves from one placement to another; ranks that have an expert take turns to give it."""
    found: list[Move] = []
    for target, (before, after) in enumerate(zip(old, new, strict=True)):
        for slot, (had, wanted) in enumerate(zip(before, after, strict=True)):
            if had != wanted:
                owners = [rank for rank, held in enumerate(old) if wanted in held]
                source = owners[len(found) % len(owners)]
                found.append(Move(source, old[source].index(wanted), target, slot))
    return found


def check_moves(layers: Mapping[int, Experts], ranks: Ranks) -> None:
    """Raise ConfigError, on all ranks, where not all slots of a layer's experts store theirs alike."""
    for experts in layers.values():
        forms = {_form(experts.tensors_of(slot)) for slot in range(experts.slots)}
        own = crc32(forms.pop().encode()) if len(forms) == 1 and "" not in forms else -1
        found = ranks.beside(torch.tensor([[own]], device=experts.expert_counts.device))
        if own == -1 or int(found.min()) != int(found.max()):
            raise ConfigError(
                f"rebalance_experts is on, and not all experts of {experts.path} are stored alike, as {experts.name}, "
                "or kernels keep numbers of theirs: they cannot change their places, leave rebalance_experts out"
            )


def _form(tensors: list[torch.Tensor] | None) -> str:
    return "" if tensors is None else str([(tensor.shape, tensor.dtype) for tensor in tensors])


def move_experts(layers: Mapping[int, Experts], placements: Mapping[int, Placement], ranks: Ranks) -> None:
    """Place the experts of some layers anew, of those that are here.

    A layer's weights are all read before any of them is overwritten.
    """
    for layer, placement in placements.items():
        if (experts := layers.get(layer)) is None:
            continue
        assert experts.share.placement is not None
        came = []
        for move in moves_between(experts.share.placement, placement):
            takes = ranks.rank == move.target
            slot = {move.source: move.source_slot, move.target: move.target_slot}.get(ranks.rank, 0)
            tensors = experts.tensors_of(slot)
            assert tensors is not None, "start asks for it"
            for tensor in tensors:
                copy = tensor.clone(memory_format=torch.contiguous_format) if takes else tensor.contiguous()
                ranks.hand(copy, move.source, move.target)
                came += [(tensor, copy)] if takes else []
        for tensor, copy in came:
            tensor.copy_(copy)
        experts.share.place(placement)
