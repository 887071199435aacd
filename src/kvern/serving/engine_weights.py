"""The engine's side of weights that change: read beside steps, then taken between two of them."""

from kvern.engine.loop import EngineLoop
from kvern.errors import ConfigError
from kvern.request.events import TokenEvent
from kvern.request.weights import WeightsFound
from kvern.serving.wire import (
    DropWeights,
    EngineChange,
    ReadWeights,
    ReleasePages,
    ResizeCache,
    TakeWeights,
    WeightsRead,
    WeightsTaken,
)


class WeightChanges:
    """Carries out what the server says about weights, the size of the KV cache, and the host's memory for pages."""

    def __init__(self, core: EngineLoop) -> None:
        self._core = core
        self._reading = ""
        self._can_change = False
        self._answers: list[WeightsRead | WeightsTaken] = []

    @property
    def busy(self) -> bool:
        """Something is being read, or to be said."""
        return bool(self._reading or self._answers)

    def hear(self, message: EngineChange) -> list[TokenEvent]:
        """Does what a message asks; returns what steps on their way have done."""
        match message:
            case ReadWeights(version, sources):
                self._reading = version
                try:
                    self._core.read_weights(version, sources)
                    self._can_change = True
                except ConfigError as error:
                    self._answer(WeightsFound(str(error), is_refused=True))
            case TakeWeights(version, keep):
                events = self._core.take_weights(version, keep)
                self._answers.append(WeightsTaken(version))
                return events
            case ResizeCache(chunks):
                return self._core.resize_cache(chunks)[1]
            case ReleasePages(size):
                self._core.release_pages(size)
            case DropWeights():
                self._reading = ""
                if self._can_change:
                    self._core.drop_weights()
        return []

    def answers(self) -> list[WeightsRead | WeightsTaken]:
        """Returns what is to be said since the last call."""
        if self._reading and (found := self._core.weights_found()) is not None:
            self._answer(found)
        answers, self._answers = self._answers, []
        return answers

    def _answer(self, found: WeightsFound) -> None:
        self._answers.append(WeightsRead(self._reading, found))
        self._reading = ""
