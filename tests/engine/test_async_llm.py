"""AsyncLLM: many coroutines, one engine, and what happens when somebody leaves or the engine ends."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, AsyncLLM, SamplingParams
from kvern.errors import EngineClosed, InvalidRequest
from tests.support.served import ENGINE, PATIENCE, child_of, eventually

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=100)
PROMPTS = ["the quick brown fox", "jumps over the lazy dog and over the fox", "a"]
MESSAGES = [{"role": "user", "content": "the fox"}]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(tiny_model), max_model_len=256, threads=1)
    yield llm
    llm.close()


def serve(llm: AsyncLLM, work: Callable[[AsyncLLM], Any]) -> None:
    """Run a coroutine with an engine that is idle after it."""

    async def main() -> None:
        await asyncio.wait_for(work(llm), PATIENCE)
        await asyncio.to_thread(eventually, lambda: (llm.statistics().running, llm.statistics().waiting) == (0, 0))

    asyncio.run(main())


def test_async_verbs_answer_like_those_of_llm(tiny_llm: LLM, llm: AsyncLLM) -> None:
    async def work(engine: AsyncLLM) -> None:
        before = engine.statistics().requests
        found = await engine.generate(PROMPTS, GREEDY)
        assert [result.outputs for result in found] == [result.outputs for result in tiny_llm.generate(PROMPTS, GREEDY)]
        (chat,) = await engine.chat(MESSAGES, GREEDY)
        assert chat.outputs == tiny_llm.chat(MESSAGES, GREEDY)[0].outputs
        async for output in engine.stream_chat(MESSAGES, GREEDY):
            last = output
        assert last.finished and last.outputs == chat.outputs
        assert engine.statistics().requests == before + 5

    serve(llm, work)


@pytest.mark.nightly
def test_async_streams_share_batches(llm: AsyncLLM) -> None:
    async def read(engine: AsyncLLM, number: int) -> list[int]:
        texts = [""]
        async for output in engine.stream([5 + number, 6, 7], GREEDY.replace(max_tokens=40)):
            assert output.outputs[0].text.startswith(texts[-1])
            texts.append(output.outputs[0].text)
        return output.outputs[0].token_ids

    async def work(engine: AsyncLLM) -> None:
        alone = [await read(engine, number) for number in range(6)]
        before = engine.statistics().steps
        assert await asyncio.gather(*(read(engine, number) for number in range(6))) == alone
        assert engine.statistics().steps - before < 6 * 40

    serve(llm, work)


def test_cancelling_aborts(llm: AsyncLLM) -> None:
    async def read(engine: AsyncLLM, started: asyncio.Event) -> None:
        async for _ in engine.stream(PROMPTS[0], LONG.replace(max_tokens=200)):
            started.set()

    async def work(engine: AsyncLLM) -> None:
        started, before = asyncio.Event(), engine.statistics().generation_tokens
        task = asyncio.create_task(read(engine, started))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.generate(PROMPTS[1], GREEDY)  # after the abort, in the engine's order
        assert engine.statistics().generation_tokens - before < 200

    serve(llm, work)


def test_leaving_an_async_stream_aborts(llm: AsyncLLM) -> None:
    async def work(engine: AsyncLLM) -> None:
        before = engine.statistics().generation_tokens
        stream = engine.stream(PROMPTS[0], LONG.replace(max_tokens=200))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await engine.generate(PROMPTS[1], GREEDY)
        assert engine.statistics().generation_tokens - before < 200

    serve(llm, work)


def test_async_errors_reach_who_asked(llm: AsyncLLM) -> None:
    async def work(engine: AsyncLLM) -> None:
        good = asyncio.create_task(engine.generate(PROMPTS[0], GREEDY))
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            await engine.generate(["a", ""], GREEDY)
        with pytest.raises(InvalidRequest, match="token id 400"):
            async for _ in engine.stream([400]):
                pass
        assert len((await good)[0].outputs[0].token_ids) == 12

    serve(llm, work)


@pytest.mark.nightly
def test_streams_outlive_their_engine(llm: AsyncLLM) -> None:
    """Another engine goes on with the same tokens."""
    drawn = SamplingParams(temperature=0.8, seed=7, max_tokens=150, ignore_eos=True)

    async def tokens(engine: AsyncLLM, prompt: str, kills: bool = False) -> list[int]:
        async for output in engine.stream(prompt, drawn):
            if kills and len(output.outputs[0].token_ids) > 20:
                kills = False
                os.kill(child_of(os.getpid(), ENGINE), signal.SIGKILL)
        assert not kills
        return output.outputs[0].token_ids

    async def work(engine: AsyncLLM) -> None:
        expected = await asyncio.gather(*(tokens(engine, prompt) for prompt in PROMPTS))
        first, *others = PROMPTS
        found = await asyncio.gather(tokens(engine, first, kills=True), *(tokens(engine, one) for one in others))
        assert found == expected

    serve(llm, work)


@pytest.mark.nightly
def test_two_async_engines_share_the_work(tiny_model: Path, tiny_llm: LLM) -> None:
    async def work(engine: AsyncLLM) -> None:
        found = await engine.generate(PROMPTS, GREEDY)
        assert [result.outputs for result in found] == [result.outputs for result in tiny_llm.generate(PROMPTS, GREEDY)]
        assert engine.statistics().requests == len(PROMPTS)

    engines = AsyncLLM(str(tiny_model), max_model_len=256, threads=1, data_parallel_size=2)
    serve(engines, work)
    engines.close()


def test_closing_an_async_engine_ends_its_streams(tiny_model: Path) -> None:
    async def main() -> None:
        engine = AsyncLLM(str(tiny_model), max_model_len=256, threads=1)
        stream = engine.stream(PROMPTS[0], LONG.replace(max_tokens=250))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineClosed, match="the engine is closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineClosed, match="the engine is closed"):
            await engine.generate(PROMPTS[0], GREEDY)
        engine.close()

    asyncio.run(main())
