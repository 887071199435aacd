"""What compiles grammars and makes matchers: when it fails, is slow or forgets, each form has its answer in time."""

import asyncio
import gc
import json
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from kvern.config import EngineConfig
from kvern.errors import InvalidParameter, ServerBusy
from kvern.models.hub import resolve_model
from kvern.request.sampling_params import StructuredOutput
from kvern.serving.client_inputs import ClientInputs
from kvern.structured import apart, masks
from kvern.structured.apart import GrammarProcesses
from kvern.structured.compiler import compile_grammar
from kvern.structured.grammar import Grammars, NotCompiled
from kvern.structured.masks import GrammarRows
from kvern.structured.matchers import GrammarLibrary, Matchers
from kvern.text.tokenizer import Tokenizer
from tests.support.grammars_apart import compiled_apart

FORM = StructuredOutput(regex="[ab]+")


def grammars_apart(folder: Path | None = None) -> Grammars:
    return Grammars(folder or resolve_model("kvern-1m"), 4100, apart=True)


async def compiled(processes: GrammarProcesses, grammars: Grammars) -> str:
    async with asyncio.timeout(240):
        return await compiled_apart(processes, grammars, FORM)


async def started(processes: GrammarProcesses) -> None:
    """Or failed to."""
    processes.start()
    assert processes._worker is not None
    await asyncio.wait([processes._worker])


def test_what_is_remembered_again_is_counted_once() -> None:
    grammars = grammars_apart()
    for _ in range(40):
        grammars.remember(b"one", "x" * (1 << 20))
    grammars.remember(b"another", "y")
    assert grammars.knows(b"one") and grammars.knows(b"another")
    grammars.remember(b"one", "x")
    for number in range(31):
        grammars.remember(b"%d" % number, "x" * (1 << 20))
    assert grammars.knows(b"one") and grammars.knows(b"another")


def test_a_form_that_is_always_forgotten_ends() -> None:
    async def told() -> None:
        grammars, folder = grammars_apart(), resolve_model("kvern-1m")
        inputs = ClientInputs(EngineConfig("kvern-1m"), folder, Tokenizer(folder))
        inputs._grammars = GrammarProcesses(grammars)
        grammars.remember(b"form", "known")

        def work() -> None:
            raise NotCompiled(b"form")

        async with asyncio.timeout(240):
            await inputs.run(0, work, "owner")

    with pytest.raises(ServerBusy, match="too many other forms"):
        asyncio.run(told())


def test_a_worker_that_does_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def told() -> None:
        grammars = grammars_apart()
        processes = GrammarProcesses(grammars)
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/nowhere/python")
            processes.start()
            with pytest.raises(ServerBusy, match="does not start"):
                await compiled(processes, grammars)
            await started(processes)
        assert await compiled(processes, grammars)
        await processes.close()

    asyncio.run(told())


def test_what_never_started_can_be_closed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def told() -> None:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        processes = GrammarProcesses(grammars_apart())
        await started(processes)
        await processes.close()
        await started(GrammarProcesses(grammars_apart()))

    asyncio.run(told())
    gc.collect()
    assert not caplog.records


def test_a_worker_that_is_stuck_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 600\n")
    stuck.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stuck))
    monkeypatch.setattr(apart, "LONGEST_START", 0.1)

    async def told() -> None:
        grammars = grammars_apart()
        processes = GrammarProcesses(grammars)
        with pytest.raises(ServerBusy, match="does not start"):
            await compiled(processes, grammars)
        await processes.close()

    asyncio.run(told())


@pytest.mark.parametrize("what", ["decoder", "added_tokens"])
def test_a_tokenizer_that_the_library_cannot_use(tmp_path: Path, what: str) -> None:
    """It refuses the first, and panics at a token as long as the second's."""
    shutil.copytree(resolve_model("kvern-1m"), tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    if what == "decoder":
        tokenizer["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    else:
        flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
        tokenizer["added_tokens"].append({"id": 4096, "content": "x" * 2000, **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))

    async def told() -> None:
        grammars = grammars_apart(tmp_path)
        processes = GrammarProcesses(grammars)
        with pytest.raises(InvalidParameter, match="structured: llguidance cannot be used with this model's tokenizer"):
            await compiled(processes, grammars)
        await processes.close()

    asyncio.run(told())


class Slow(GrammarLibrary):
    """A library whose matchers of grammars that are called slow are made when they may."""

    def __init__(self) -> None:
        super().__init__(resolve_model("kvern-1m"), 4096)
        self.may = threading.Event()

    def matcher(self, grammar: str) -> LLMatcher:
        if grammar.startswith("slow "):
            assert self.may.wait(240)
        return super().matcher(grammar.removeprefix("slow ").lstrip("0123456789 "))


@pytest.fixture
def slow() -> Iterator[Slow]:
    library = Slow()
    yield library
    library.may.set()


def test_who_begins_does_not_wait_for_what_is_prepared(slow: Slow) -> None:
    grammar = compile_grammar(FORM, slow)
    store = Matchers(slow)
    futures = [store.prepare(f"slow {number} {grammar}") for number in range(64)]
    with ThreadPoolExecutor(1) as threads:
        try:
            assert len(threads.submit(store.take, [grammar] * 3).result(timeout=240)) == 3
        finally:
            slow.may.set()
    for future in futures:
        assert future is not None and future.result(240) is None
    kept = len(store._spare)
    [matcher, *_] = store.take([f"slow 1 {grammar}", grammar])
    assert matcher is not None and len(store._spare) == kept - 1


def test_masks_that_took_long_are_made_side_by_side_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "LONGEST_FILL_SECONDS", -1.0)
    grammars = Grammars(resolve_model("kvern-1m"), 4096)
    rows = GrammarRows(grammars.library, 4096, torch.device("cpu"))
    matcher = grammars.library.matcher(grammars.compile(FORM))
    modes: list[bool] = []

    def fill(going: Sequence[tuple[Any, int]], masks: torch.Tensor, side_by_side: bool) -> None:
        modes.append(side_by_side)

    monkeypatch.setattr(grammars.library, "fill", fill)
    for _ in range(4):
        rows._fill([(matcher, 0)], torch.empty(1, 128, dtype=torch.int32), side_by_side=True)
    assert modes == [True, False, True, False]
