"""An extension of the KV cache, added in this file with one registration and nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvern import LLM, SamplingParams
from kvern.cache.extension import CacheExtension
from kvern.cache.radix import CachedPrefix, CacheMemory, SequenceEnd
from kvern.engine.factory import EXTENSIONS
from kvern.request.request import Request
from kvern.request.step import ExtensionMessage, SchedulerOutput
from tests.support.idle import is_idle
from tests.support.internals import core_of

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "block_size": 4,
    "max_model_len": 64,
    "kv_cache_tokens": 120,
    "max_batch_requests": 2,
}
PROMPTS = [[*range(20, 44), number, *range(number, number + 12)] for number in range(60, 64)]


class LimitMessage(ExtensionMessage, frozen=True, array_like=True, gc=False):
    """The rows that have joined."""

    extension: ClassVar[str] = "limit"

    slots: list[int]


class Limit(CacheExtension):
    """Lets a request continue from two cached blocks at most, after it has waited for an answer from elsewhere."""

    name = LimitMessage.extension

    def __init__(self, memory: CacheMemory) -> None:
        self.block_size = memory.block_size
        self.looked: dict[Request, int] = {}
        self.running: set[Request] = set()
        self.slots: list[int] = []
        self.waited = self.told = 0

    def arrived(self, request: Request, contents: Sequence[int]) -> None:
        self.looked[request] = 2

    def lookup(self, request: Request, contents: Sequence[int], step: int, reserve: int) -> bool:
        return self.looked.get(request, 0) > 0

    def ready(self) -> list[Request]:
        self.looked = {request: count - 1 for request, count in self.looked.items()}
        ended = [request for request, count in self.looked.items() if count <= 0]
        self.waited += len(ended)
        self.looked = {request: count for request, count in self.looked.items() if count > 0}
        return ended

    def match(self, prefix: CachedPrefix, step: int | None) -> CachedPrefix:
        return prefix if len(prefix.path) < 2 else CachedPrefix(prefix.path[:2], None, 0, prefix.known)

    def begin(self, request: Request, prefix: CachedPrefix) -> None:
        self.running.add(request)

    def placed(self, request: Request) -> None:
        self.slots.append(request.slot)

    def leave(self, request: Request, end: SequenceEnd | None) -> None:
        self.running.discard(request)

    def plan(self, output: SchedulerOutput) -> ExtensionMessage | None:
        slots, self.slots = self.slots, []
        self.told += len(slots)
        return LimitMessage(slots) if slots and output.scheduled else None

    def check(self, running: Sequence[Request], loading: Sequence[Request]) -> int:
        assert self.running == set(running) and set(loading) <= self.looked.keys()
        return 0


def test_an_extension_is_one_file_and_one_registration(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = LLM(tiny_model, **OPTIONS).generate(PROMPTS, PARAMS)
    monkeypatch.setattr("kvern.engine.factory.EXTENSIONS", [*EXTENSIONS, lambda config, layout: Limit])
    llm = LLM(tiny_model, **OPTIONS)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in expected]
    limit = core_of(llm).scheduler.cache.extension(Limit)
    assert limit is not None and limit.waited == limit.told == 2 * len(PROMPTS)
    assert [output.cached_tokens for output in outputs] == [2 * limit.block_size] * len(PROMPTS)
    core_of(llm).scheduler.check_integrity()
    assert is_idle(llm)
