"""Rows of encoded images in a pool on the device: who waits for which, what is encoded when, and what is evicted.

    wanted --places, Decoder.begin--> DECODING --pixels--> ENCODING, some parts a step --report--> READY --> evicted

A request waits, ENCODING, until the image of its next token is READY; others run meanwhile. A request that runs and
comes to an image that is not READY computes nothing until it is. Nothing is decoded or encoded of an image whose tokens
are all cached.

An image has places from the moment in which it is asked for, and keeps them while a request wants it: the image of its
next token first, then those after it. A running request may take the places of what waiting requests alone want. So of
all that run, each holds what it needs first, or nothing, and no two wait for each other's places. An image that nobody
wants stays until its places are needed, the one that was used longest ago first, and not before the steps that read it
have come back.

No torch, and no clock: the first rank decides, and the others are told.
"""

import enum
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol
from weakref import WeakKeyDictionary

import msgspec

from kvern.cache.block_pool import BlockPool
from kvern.cache.extension import CacheExtension
from kvern.cache.messages import EncodingStart, ImageMessage
from kvern.cache.radix import CacheMemory, SequenceEnd
from kvern.errors import UnreadableContent
from kvern.images.spans import ImageSpan
from kvern.images.views import Grid
from kvern.request.events import EngineStatistics
from kvern.request.request import PromptInput, Request, State
from kvern.request.spans import cut
from kvern.request.step import ExtensionMessage, SchedulerOutput


class Decoder(Protocol):
    """Decodes images beside the engine; each method returns at once."""

    def begin(self, number: int, data: bytes) -> None:
        """Begins to decode a file; `finished` will name its number."""

    def cancel(self, number: int) -> None:
        """Nobody wants this image any more; `finished` may still name it."""

    def finished(self) -> list[tuple[int, memoryview | str]]:
        """Returns the images that have been decoded since the last call: the patches' bytes, or why there are none."""


@dataclass(frozen=True)
class EncoderLimits:
    """The facts of an encoder that the pool needs.

    spans   finds the images of a prompt
    places  how many rows the device keeps
    parts   in how many parts the pieces of an image are encoded, layers or slices of layers, and the cost of each: the
            tokens that the language model computes in the same time
    whole   a prompt is computed in one step, before which all its images must be READY
    """

    spans: Callable[[PromptInput], Sequence[ImageSpan]]
    places: int
    parts: Callable[[Sequence[Grid]], tuple[int, float]]
    whole: bool = False


class Stage(enum.Enum):
    """The progress of an image."""

    DECODING = "decoding"
    ENCODING = "encoding"
    READY = "ready"


@dataclass(eq=False)
class _Image:
    """An image with places. `parts`: as many as steps were given. `used`: the last step that may touch its rows."""

    number: int
    span: ImageSpan
    places: list[int]
    stage: Stage = Stage.DECODING
    pixels: memoryview | None = None
    parts: int = 0
    used: int = 0
    wanted: dict[Request, None] = field(default_factory=dict)

    @property
    def is_pinned(self) -> bool:
        """A running request wants it."""
        return any(request.state is State.RUNNING for request in self.wanted)


class ImagePool(CacheExtension):
    """The rows of images on the device, and the requests that wait for them."""

    name = ImageMessage.extension

    def __init__(self, limits: EncoderLimits, decoder: Decoder, memory: CacheMemory) -> None:
        self._limits = limits
        self._decoder = decoder
        self._tree = memory.tree
        self._pool = BlockPool(limits.places)
        self._images: OrderedDict[bytes, _Image] = OrderedDict()
        """The images by name; the one wanted longest ago is the first."""
        self._pending: dict[int, _Image] = {}
        """The images that are not READY, by number."""
        self._spans: WeakKeyDictionary[Request, Sequence[ImageSpan]] = WeakKeyDictionary()
        self._running: dict[Request, None] = {}
        """Running requests whose images are not all computed."""
        self._waiting: dict[Request, int] = {}
        """The requests that are ENCODING, each with the tokens after which it would continue."""
        self._hungry: dict[Request, None] = {}
        """The requests in `_waiting` whose image has no rows on the device."""
        self._failed: list[tuple[Request, str]] = []
        self._message = ImageMessage([], [], [], [])
        self._count = self._step = self._completed = 0
        self.decoded = self.encoded = self.hit_rows = 0
        """The images that were decoded, those that were encoded, and the rows that requests found in the pool."""

    # Requests

    def arrived(self, request: Request, contents: Sequence[int]) -> None:
        """The images of a new prompt are decoded while it waits for its turn."""
        if not request.spec.prompt.attachments:
            return
        prompt = request.spec.prompt
        self._spans[request] = [
            span._replace(start=cut(prompt.spans, span.start)) for span in self._limits.spans(prompt)
        ]  # all of a span of tokens that see each other is computed at once
        is_new = request.leader is None and request.search is None and len(request.token_ids) == request.prompt_length
        if is_new:
            path, _, shared = self._tree.match(request.cache_namespace, contents, request.most_cached)
            self._want(request, sum(len(node.tokens) for node in path) + shared)

    def awaits(self, request: Request, computed: int) -> bool:
        spans = self._want(request, computed)
        needed = [span for span in spans if self._limits.whole or span.start <= computed]
        if all(self._is_ready(span) for span in needed):
            return False
        self._waiting[request] = computed
        if not all(span.key in self._images for span in needed):
            self._hungry[request] = None
        return True

    def placed(self, request: Request) -> None:
        if self._want(request, request.num_computed_tokens):
            self._running[request] = None

    def until(self, request: Request, tokens: int) -> int:
        """No token of an image is computed before all its rows are there."""
        if request not in self._running:
            return tokens
        computed = request.num_computed_tokens
        missing = (span.start for span in self._want(request, computed) if not self._is_ready(span))
        return min(tokens, max(0, next(missing, computed + tokens) - computed))

    def leave(self, request: Request, end: SequenceEnd | None) -> None:
        if self._running.pop(request, 0) is None:
            self._release(request, ())

    def forget(self, request: Request) -> None:
        if request in self._spans:
            self._release(request, ())
            self._let_run([request])
            del self._spans[request]

    def _want(self, request: Request, computed: int) -> list[ImageSpan]:
        """Ask for the images of a request's tokens after those that are computed, in order, as far as places go."""
        spans = [span for span in self._spans.get(request, ()) if span.end > computed]
        self._release(request, {span.key for span in spans})
        if self._limits.whole and not self._fit_together(request, spans):
            return spans
        for number, span in enumerate(spans):
            image = self._images.get(span.key)
            if image is None:
                if not self._make_room(span.rows, request):
                    self._release(request, {span.key for span in spans[:number]})  # also what comes twice
                    break
                image = self._begin(span)
            elif request not in image.wanted and image.stage is Stage.READY:
                self.hit_rows += span.rows
            image.wanted[request] = None
            self._images.move_to_end(span.key)
        return spans

    def _fit_together(self, request: Request, spans: Sequence[ImageSpan]) -> bool:
        """Make room for all images that a request lacks; whether that is possible. If not, it holds none."""
        missing = {span.key: span.rows for span in spans if span.key not in self._images}
        for span in spans:
            if span.key not in missing:
                self._images[span.key].wanted[request] = None
        fits = self._make_room(sum(missing.values()), request)
        if not fits:
            self._release(request, ())
        return fits

    def _release(self, request: Request, needed: Collection[bytes]) -> None:
        """A request wants no images but those of these names."""
        for span in self._spans.get(request, ()):
            if span.key not in needed and span.key in self._images:
                self._images[span.key].wanted.pop(request, None)

    def _is_ready(self, span: ImageSpan) -> bool:
        image = self._images.get(span.key)
        return image is not None and image.stage is Stage.READY

    # Places

    def _make_room(self, rows: int, request: Request) -> bool:
        """Evict images until this many rows are free; False, and none is evicted, if that is not possible."""
        lacking = rows - self._pool.free_count
        if lacking <= 0:
            return True
        idle = [image for image in self._images.values() if image.used <= self._completed]
        victims = [image for image in idle if not image.wanted]
        if request.state is State.RUNNING:
            victims += [image for image in reversed(idle) if image.wanted and not image.is_pinned]
        if sum(len(image.places) for image in victims) < lacking:
            return False
        for image in victims:
            if self._pool.free_count >= rows:
                break
            self._drop(image)
        return True

    def _begin(self, span: ImageSpan) -> _Image:
        self._count += 1
        shown = span._replace(file=replace(span.file, data=b""))  # rows outlive requests, and files do not
        image = _Image(self._count, shown, self._pool.allocate(span.rows))
        self._images[span.key] = self._pending[image.number] = image
        self._decoder.begin(image.number, span.file.data)
        return image

    def _drop(self, image: _Image) -> None:
        del self._images[image.span.key]
        self._pending.pop(image.number, None)
        self._pool.release(image.places)
        if image.stage is Stage.DECODING:
            self._decoder.cancel(image.number)
        if image.parts:
            self._message.dropped.append(image.number)
        for request in image.wanted:
            if request in self._waiting:
                self._hungry[request] = None

    # What has ended

    def failed(self) -> list[tuple[Request, str]]:
        for number, decoded in self._decoder.finished():
            image = self._pending.get(number)
            if image is None or image.stage is not Stage.DECODING:
                continue
            if isinstance(decoded, str):
                self._fail(image, f"{UnreadableContent.MARK}{decoded}")
            else:
                image.stage, image.pixels = Stage.ENCODING, decoded
                self.decoded += 1
        failed, self._failed = self._failed, []
        return failed

    def _fail(self, image: _Image, reason: str) -> None:
        self._failed += [(request, reason) for request in image.wanted]
        self._drop(image)

    def report(self, report: object) -> list[Request]:
        """Pairs of the number of an image that is encoded, and what went wrong; of those given up nothing is heard."""
        found = list[Request]()
        for number, error in msgspec.convert(report, list[tuple[int, str]]):
            image = self._pending.get(number)
            if image is None:
                continue
            if error:
                self._fail(image, error)
                continue
            del self._pending[number]
            image.stage = Stage.READY
            self.encoded += 1
            found += self._let_run([request for request in image.wanted if request in self._waiting])
        return found

    def ready(self) -> list[Request]:
        """Let requests that wait for free rows go on if there are some, in their order."""
        found = list[Request]()
        for request in list(self._hungry):
            spans = self._want(request, self._waiting[request])
            if any(span.key not in self._images for span in (spans if self._limits.whole else spans[:1])):
                break
            found += self._let_run([request])
        return found

    def _let_run(self, requests: list[Request]) -> list[Request]:
        for request in requests:
            self._waiting.pop(request, None)
            self._hungry.pop(request, None)
        return requests

    def completed(self, step: int) -> None:
        self._completed = step

    def undo(self, step: int, waiting: Sequence[Request]) -> None:
        """Forgets images that steps have begun to encode; those are READY that a step that came back has reported."""
        self._let_run([*self._waiting])
        for image in [image for image in self._pending.values() if image.parts]:
            self._drop(image)
        self._message = ImageMessage([], [], [], [])

    def renew(self) -> Sequence[Request]:
        """The encoder may have changed: what was encoded, or is in part, counts for nothing."""
        for image in [image for image in self._images.values() if image.parts]:
            self._drop(image)
        return self._let_run([*self._waiting])

    # Steps

    @property
    def is_loading(self) -> bool:
        return bool(self._pending)

    def encode(self, tokens: float) -> float:
        """At least one part is computed, if an image is decoded, and no more than costs so many `tokens`."""
        spent = 0.0
        for image in self._pending.values():
            parts, cost = self._limits.parts(image.span.grids)
            if image.stage is not Stage.ENCODING or not image.wanted or image.parts == parts:
                continue
            count = min(parts - image.parts, max(int((tokens - spent) / cost), not spent))
            if count <= 0:
                break
            spent += count * cost
            self._compute(image, count, image.parts + count == parts)
        return spent

    def _compute(self, image: _Image, count: int, ends: bool) -> None:
        """Have the next step compute some parts of an image, which are the last ones if it `ends`."""
        if image.pixels is not None:
            span, size = image.span, (image.span.file.width, image.span.file.height)
            self._message.begun.append(EncodingStart(image.number, span.key, size, image.pixels, image.places))
            image.pixels = None
        self._message.parts.append((image.number, count))
        image.parts += count
        image.used = self._step + 1
        if ends:
            self._message.ended.append(image.number)

    def plan(self, output: SchedulerOutput) -> ExtensionMessage | None:
        self._step = output.step
        for request in list(self._running):
            needed = {span.key for span in self._spans[request] if span.end > request.num_computed_tokens}
            for span in self._spans[request]:
                image = self._images.get(span.key)
                if image is not None and request in image.wanted:
                    image.used = output.step
            self._release(request, needed)
            if not needed:
                del self._running[request]
        for image in [image for image in self._pending.values() if not image.wanted and image.used < output.step]:
            self._drop(image)
        message = self._message
        if not (message.dropped or message.parts):
            return None
        self._message = ImageMessage([], [], [], [])
        return message

    def count(self, statistics: EngineStatistics) -> None:
        statistics.decoded_images, statistics.encoded_images = self.decoded, self.encoded
        statistics.image_rows_hit = self.hit_rows

    def check(self, running: Sequence[Request], loading: Sequence[Request]) -> int:
        self._pool.check_integrity()
        images = list(self._images.values())
        assert self._pool.free_count + sum(len(image.places) for image in images) == self._pool.capacity
        assert {image.number for image in images if image.stage is not Stage.READY} == self._pending.keys()
        wanting = {request for image in images for request in image.wanted}
        assert wanting <= {*self._spans} and self._running.keys() <= set(running), "one that has ended wants an image"
        assert self._waiting.keys() == {request for request in loading if request.state is State.ENCODING}
        assert self._hungry.keys() <= self._waiting.keys()
        failing = {request for request, _ in self._failed}
        for request in set(running) - failing:
            for span in self._spans.get(request, ()):
                if span.start < request.num_computed_tokens < span.end:
                    assert self._is_ready(span), "an image went while its tokens are computed"
                    assert request in self._images[span.key].wanted, "an image is not pinned that is still read"
        for request in self._waiting:
            spans = [span for span in self._spans[request] if span.end > self._waiting[request]]
            has_places = all(span.key in self._images for span in (spans if self._limits.whole else spans[:1]))
            assert has_places or request in self._hungry, "a request waits for an image that nobody brings"
        return 0
