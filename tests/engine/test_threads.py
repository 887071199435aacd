"""Programs whose threads, event loops and forked processes share an LLM."""

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, AsyncLLM, SamplingParams
from kvern.errors import InvalidRequest, RequestFailed
from tests.support.failing_runner import FailingRunner
from tests.support.idle import is_idle
from tests.support.internals import core_of, engine_of

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 64, "block_size": 4}
PROMPTS = [[5 + number, 6, 7 + number] for number in range(12)]
THREADS = 6
FORKED = """
import asyncio, os, sys
from kvern import AsyncLLM, LLM, SamplingParams
from kvern.errors import EngineDied

MANY = SamplingParams(max_tokens=2, temperature=0)

async def ask(llm):
    return await llm.generate([5, 6], MANY)

kind, options = sys.argv[2], {"threads": 1, "dtype": "float32"}
llm = AsyncLLM(sys.argv[1], **options) if kind == "async" else LLM(
    sys.argv[1], **options, **({"data_parallel_size": 2} if kind == "several" else {}))
def answer():
    return asyncio.run(ask(llm)) if kind == "async" else llm.generate([5, 6], MANY)
before = answer()[0].outputs
child = os.fork()
if not child:
    for call in (answer, lambda: LLM(sys.argv[1], **options)) if kind == "plain" else (answer,):
        try:
            call()
        except EngineDied as error:
            if f"this is process {os.getpid()}, which was forked" not in str(error):
                sys.exit(8)
        else:
            sys.exit(9)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert answer()[0].outputs == before
llm.close()
"""


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """What comes of a function in threads that begin together."""
    gate = threading.Barrier(THREADS)

    def begin(number: int) -> Any:
        gate.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


def test_threads_get_their_own_answers_from_one_batch(tiny_model: Path) -> None:
    with LLM(str(tiny_model), **OPTIONS) as llm:
        expected = [output.outputs for output in llm.generate(PROMPTS, GREEDY)]
        together = []
        step = core_of(llm).step

        def counted() -> Any:
            together.append(len(engine_of(llm).request_ids))
            return step()

        core_of(llm).step = counted

        def ask(number: int) -> Any:
            found = llm.generate(PROMPTS[number : number + 4], GREEDY)
            *_, streamed = llm.stream(PROMPTS[number], GREEDY)
            ended = {item.request_id: item for item in llm.as_completed([(f"own-{number}", PROMPTS[number], GREEDY)])}
            return [output.outputs for output in (*found, streamed, *ended.values())]

        for number, found in enumerate(in_threads(ask)):
            assert found == [*expected[number : number + 4], expected[number], expected[number]]
        assert max(together) > 4, "the requests of several threads run side by side"
        assert is_idle(llm)
        assert [output.outputs for output in llm.generate(PROMPTS, GREEDY)] == expected, "later calls are right, too"


def test_chats_of_threads_are_those_of_one(tiny_llm: LLM) -> None:
    def conversation(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"the fox {number}"}]

    expected = [tiny_llm.chat(conversation(number), GREEDY)[0].outputs for number in range(THREADS)]

    def ask(number: int) -> Any:
        *_, streamed = tiny_llm.stream_chat(conversation(number), GREEDY)
        return tiny_llm.chat(conversation(number), GREEDY)[0].outputs, streamed.outputs

    assert in_threads(ask) == [(outputs, outputs) for outputs in expected]


def test_a_thread_that_leaves_or_fails_disturbs_no_other(tiny_model: Path) -> None:
    with LLM(str(tiny_model), **OPTIONS) as llm:
        expected = [output.outputs for output in llm.generate(PROMPTS, GREEDY)]
        FailingRunner(llm)

        def ask(number: int) -> Any:
            if number == 0:
                with pytest.raises(RequestFailed, match="as planned"):
                    llm.generate([5, 250, 7], GREEDY)
                return expected[number]
            if number == 1:
                with pytest.raises(InvalidRequest):
                    llm.generate([10**9], GREEDY)
                return expected[number]
            if number == 2:
                stream = llm.stream(PROMPTS[number], GREEDY)
                next(stream)
                stream.close()
                return expected[number]
            return llm.generate(PROMPTS[number], GREEDY)[0].outputs

        assert in_threads(ask) == expected[:THREADS]
        assert is_idle(llm)


def test_a_thread_that_is_interrupted_leaves_the_steps_to_another(tiny_model: Path) -> None:
    with LLM(str(tiny_model), **OPTIONS) as llm:
        expected = llm.generate(PROMPTS[1], GREEDY)[0].outputs
        led, joined = threading.Event(), threading.Event()

        def is_interrupted() -> bool:
            led.set()
            joined.wait()
            raise KeyboardInterrupt

        def lead() -> None:
            with pytest.raises(KeyboardInterrupt):
                llm._shared.wait_until(is_interrupted)

        leader = threading.Thread(target=lead)
        leader.start()
        led.wait()
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(llm.generate, PROMPTS[1], GREEDY)
            joined.set()
            assert found.result()[0].outputs == expected
        leader.join()


def test_a_stream_that_python_closes_during_a_step_ends(tiny_model: Path) -> None:
    with LLM(str(tiny_model), **OPTIONS) as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        kept = [stream]
        del stream
        step = core_of(llm).step

        def collects() -> Any:
            if kept:  # once: a collection takes as long as all else in a process with many tests' objects
                kept.clear()
                gc.collect()
            return step()

        core_of(llm).step = collects
        llm.generate(PROMPTS[1], GREEDY)
        assert is_idle(llm)


def test_a_call_tells_which_of_its_requests_failed(tiny_model: Path) -> None:
    with LLM(str(tiny_model), **OPTIONS) as llm:
        (good,) = llm.generate([5, 6, 7], GREEDY)
        FailingRunner(llm)
        with pytest.raises(RequestFailed, match="1 of 2 requests failed, the first with: its step failed") as caught:
            llm.generate([[5, 6, 7], [5, 252, 7]], GREEDY)
        assert [output.failure is None for output in caught.value.outputs] == [True, False]
        assert caught.value.outputs[0].outputs == good.outputs
        returned = llm.generate([[5, 6, 7], [5, 252, 7]], GREEDY, on_error="return")
        assert [output.failure is None for output in returned] == [True, False]
        with pytest.raises(RequestFailed, match="as planned") as streamed:
            list(llm.stream([5, 252, 7], GREEDY))
        assert len(streamed.value.outputs[0].outputs[0].token_ids) == 3, "what was said before stays"
        with pytest.raises(ValueError, match="on_error must be one of raise, return, and is 'ignore'"):
            llm.generate([5], GREEDY, on_error="ignore")  # type: ignore[arg-type]


def test_event_loops_of_several_threads_share_an_engine(tiny_model: Path, tiny_llm: LLM) -> None:
    llm = AsyncLLM(str(tiny_model), **OPTIONS)
    try:
        expected = [output.outputs for output in tiny_llm.generate(PROMPTS[:THREADS], GREEDY)]

        async def ask(number: int) -> Any:
            async for output in llm.stream(PROMPTS[number], GREEDY):
                last = output
            (again,) = await llm.generate(PROMPTS[number], GREEDY)
            return last.outputs, again.outputs

        found = in_threads(lambda number: asyncio.run(ask(number)))
        assert found == [(outputs, outputs) for outputs in expected]
    finally:
        llm.close()


@pytest.mark.parametrize(
    "kind",
    ["plain", pytest.param("async", marks=pytest.mark.nightly), pytest.param("several", marks=pytest.mark.nightly)],
)
def test_a_forked_process_is_told_and_the_first_goes_on(tiny_model: Path, kind: str) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED, str(tiny_model), kind], timeout=120)
    assert done.returncode == 0
