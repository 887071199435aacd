"""Sums of the time of the parts and layers of measured steps, beside the least that these parts could take."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvern.device.marks import MIXER, MLP, PARTS
from kvern.engine.step_load import StepLoad
from kvern.request.layer_times import LayerTimes, MeasuredStep, StepTimes
from kvern.spec.mixers import RecurrentSpec
from kvern.spec.model import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from kvern.planning.estimate import PartBounds

MOST_LOADS = 64
"""Measured steps whose times may still come, from other stages or from a GPU."""


class LayerSeconds:
    """The times of one step of `every`, whose parts have the names that suit the model."""

    def __init__(self, every: int, spec: ModelSpec) -> None:
        self._every = every
        self._names = [{MIXER: mixer_name(layer), MLP: mlp_name(layer)} for layer in spec.layers]
        self._bounds: PartBounds | None = None
        self._loads: dict[int, StepLoad] = {}
        self._sums: LayerTimes = {}
        self._is_told = True

    def divide(self, bounds: "PartBounds | None") -> None:
        """Compares with these bounds from now on; None: nobody knows how fast this machine is."""
        self._bounds = bounds

    def began(self, step: int, load: StepLoad) -> None:
        """A step of this number is about to be submitted."""
        if step % self._every == 0 and load.rows:
            self._loads[step] = load
            if len(self._loads) > MOST_LOADS:
                del self._loads[next(iter(self._loads))]

    def ended(self, measured: Iterable[MeasuredStep]) -> None:
        """Adds what was measured."""
        for one in measured:
            if (load := self._loads.get(one.step)) is not None:
                self._add(one, load)
                self._is_told = False

    def forget(self) -> None:
        """The steps in flight are lost."""
        self._loads.clear()

    def report(self) -> LayerTimes:
        """Returns all sums, if they have changed since the last call; else nothing."""
        if self._is_told:
            return {}
        self._is_told = True
        return self._sums

    def _add(self, one: MeasuredStep, load: StepLoad) -> None:
        sums = self._sums.setdefault("prompt" if load.prompt else "decode", StepTimes(layers=[0.0] * len(self._names)))
        least = {}
        if one.is_whole:
            sums.steps += 1
            sums.rows += load.rows
            least = {} if self._bounds is None else self._bounds.least(load.rows, load.prompt, load.keys, load.pairs)
        found = dict.fromkeys(least, 0.0)
        for code, seconds in one.seconds.items():
            layer, part = divmod(code, len(PARTS))
            name = PARTS[part]
            if layer:
                sums.layers[layer - 1] += seconds
                name = self._names[layer - 1].get(part, name)
            found[name] = found.get(name, 0.0) + seconds
        for name, seconds in found.items():
            before = sums.parts.get(name, (0.0, 0.0))
            sums.parts[name] = before[0] + seconds, before[1] + least.get(name, 0.0)


def mixer_name(layer: LayerSpec) -> str:
    """Returns what the time of a layer's mixer counts as: of two mixers, as attention."""
    attending = [mixer for mixer in layer.mixers if not isinstance(mixer, RecurrentSpec)]
    if not attending:
        return "recurrent"
    return "window" if all(getattr(mixer, "window", None) for mixer in attending) else "attention"


def mlp_name(layer: LayerSpec) -> str:
    """Returns what the time of a layer's MLP counts as."""
    return "mlp" if layer.mixture is None else "experts"
