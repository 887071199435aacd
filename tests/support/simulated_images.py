"""Images in the simulated engine: runs of tokens with rows, which the device reads from the places of its pool."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvern.cache.images import EncoderLimits, ImagePool
from kvern.cache.manager import KVCacheManager, MakeExtension
from kvern.cache.messages import EncodingStart, ImageMessage, TierIndex
from kvern.cache.states import StatePool
from kvern.errors import UnreadableContent
from kvern.images.file import ImageFile
from kvern.images.spans import ImageSpan
from kvern.images.views import Grid
from kvern.request.events import TokenEvent
from kvern.request.request import PromptInput, Request
from kvern.request.step import ModelRunnerOutput, SchedulerOutput
from tests.support.simulated_device import Setup, SimulatedDevice
from tests.support.simulated_engine import SimulatedEngine

PARTS = 3
"""Each image has so many, or one or two more."""
BROKEN = b"\3"
"""Images whose tokens end so cannot be decoded."""
UNREADABLE = "an image cannot be decoded: as planned"
TOLD = UnreadableContent.MARK + UNREADABLE
"""The reason that a request is given."""


def spans_of(prompt: PromptInput) -> list[ImageSpan]:
    """An attachment has the places of an image's first and last token; the same tokens are the same image."""
    found = []
    for first, last in prompt.attachments:
        name = bytes(prompt.token_ids[first : last + 1])
        found.append(ImageSpan(name, first, last + 1, len(name), [Grid(1, len(name))], ImageFile(name, 1, 1)))
    return found


def parts_of(grids: Sequence[Grid]) -> tuple[int, float]:
    """How many parts an image has, and what each costs."""
    return PARTS + grids[0].cells % 3, 0.4 * grids[0].cells


class SimulatedDecoder:
    """Ends whatever it has begun at some later time, in any order."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self.begun: dict[int, bytes] = {}
        self.count = 0

    def begin(self, number: int, data: bytes) -> None:
        self.begun[number] = data
        self.count += 1

    def cancel(self, number: int) -> None:
        if self._dice.random() < 0.5:  # the others are named all the same
            self.begun.pop(number, None)

    def finished(self) -> list[tuple[int, memoryview | str]]:
        ended = [number for number in self.begun if self._dice.random() < 0.3]
        found = [(number, self.begun.pop(number)) for number in ended]
        return [(number, UNREADABLE if data.endswith(BROKEN) else memoryview(data)) for number, data in found]


@dataclass(frozen=True)
class ImageSetup(Setup):
    """`places`: rows of images that fit."""

    places: int = 8
    seed: int = 0

    def cache(self, tier: TierIndex | None) -> KVCacheManager:
        limits = EncoderLimits(spans_of, self.places, parts_of, not self.chunked)
        extensions: list[MakeExtension] = [partial(ImagePool, limits, SimulatedDecoder(self.seed))]
        if self.states:
            extensions.insert(0, partial(StatePool, self.states, 1))
        return KVCacheManager(self.blocks, self.size, self.prefix_cache, extensions=extensions)


class ImageDevice(SimulatedDevice):
    """Writes rows to places, and checks that each token of an image finds its own."""

    def __init__(self, setup: ImageSetup, requests: dict[str, Request]) -> None:
        super().__init__(setup, requests)
        self.places: list[tuple[bytes, int] | None] = [None] * setup.places
        self._encoding: dict[int, tuple[EncodingStart, int]] = {}
        self._known: dict[bytes, Sequence[int]] = {}
        self.read = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        message = output.message(ImageMessage)
        if message is not None:
            self._encode(message)
        if not self._lost:
            for item, name in zip(output.scheduled, output.request_ids, strict=True):
                self._check(self.requests[name.split("/")[0]], item.start, item.start + item.count)
        result = super().execute(output)
        if message is not None:
            result.reports[ImageMessage.extension] = [(number, "") for number in message.ended]
        return result

    def _encode(self, message: ImageMessage) -> None:
        if self._lost:  # these never were; the worst that the memory may have then
            for start in message.begun:
                for place in start.places:
                    self.places[place] = None
            return
        for number in message.dropped:
            self._encoding.pop(number, None)
        for start in message.begun:
            assert bytes(start.pixels) == start.key
            self._encoding[start.number] = start, 0
        for number, count in message.parts:
            start, parts = self._encoding[number]
            self._encoding[number] = start, parts + count
        for number in message.ended:
            start, parts = self._encoding.pop(number)
            assert parts == PARTS + len(start.places) % 3
            self._known[start.key] = start.places
            for row, place in enumerate(start.places):
                self.places[place] = start.key, row

    def _check(self, request: Request, start: int, end: int) -> None:
        for span in spans_of(request.spec.prompt):
            for position in range(max(start, span.start), min(end, span.end)):
                row = position - span.start
                assert self.places[self._known[span.key][row]] == (span.key, row), "a token reads another image's row"
                self.read += 1

    def abandon(self) -> None:
        super().abandon()
        self._encoding.clear()


class ImageEngine(SimulatedEngine):
    """A simulated engine whose prompts may have images."""

    def __init__(self, setup: ImageSetup) -> None:
        super().__init__(setup)
        self.device: ImageDevice = ImageDevice(setup, self.requests)
        self.device.records = self.records
        pool = self.cache.extension(ImagePool)
        assert pool is not None
        self.images = pool
        self.refused = 0

    def see(self, prompt: list[int], images: Sequence[tuple[int, int]], max_tokens: int = 4, **options: Any) -> None:
        """Queue a prompt whose images stand at these first and last places."""
        self.add(prompt, max_tokens, attachments=tuple(images), **options)

    def _check_search(self, request: Request, name: str) -> None:
        if all(self.heard[answer].stop_reason != TOLD for answer in request.spec.answer_ids):
            super()._check_search(request, name)

    def _hear(self, event: TokenEvent) -> None:
        if event.stop_reason == TOLD:
            request = self.requests[event.request_id.split("#")[0] + "#0"]
            assert any(span.key.endswith(BROKEN) for span in spans_of(request.spec.prompt)), "innocent"
            self._ended_outside |= {other for other in self.requests.values() if other.unit == request.unit}
            self.refused += 1
        super()._hear(event)
