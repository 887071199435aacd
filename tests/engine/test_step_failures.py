"""A step that raises ends the one request that causes it; nobody else notices."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import openai
import pytest
import zmq

import kvern.engine.beams
from kvern import LLM, RequestOutput
from kvern.engine.beams import BeamSearch
from kvern.errors import RequestFailed
from kvern.llm import FailedRequest
from kvern.request.step import ModelRunnerOutput, SchedulerOutput
from kvern.runner.executor import Executor
from kvern.serving.process import serve
from kvern.serving.wire import (
    AddRequest,
    Events,
    Shutdown,
    decode_for_server,
    encode,
)
from tests.support.failing_runner import GREEDY, KINDS, MARKS, OPTIONS, REASON, FailingRunner, crowd, said
from tests.support.idle import is_idle
from tests.support.internals import core_of, engine_of
from tests.support.peft_adapters import make_adapter
from tests.support.served import SMALL, Served, serving


@pytest.mark.sample(3)
@pytest.mark.parametrize("where", ["before", "behind", "result"])
@pytest.mark.parametrize(
    "options",
    [{}, {"prefix_cache": False, "kv_cache_tokens": 128}, {"kv_cache": "contiguous", "batching": "static"}],
    ids=str,
)
def test_others_get_the_answers_that_they_get_without(tiny_model: Path, where: str, options: dict[str, Any]) -> None:
    prompts, params = crowd()
    marked = [number for number, prompt in enumerate(prompts) if MARKS.keys() & set(prompt)]
    innocent = [number for number in range(30) if number not in marked]
    with LLM(str(tiny_model), **(OPTIONS | options)) as llm:
        expected = llm.generate([prompts[number] for number in innocent], [params[number] for number in innocent])
        core_of(llm).scheduler.cache.tree.clear()
        runner = FailingRunner(llm, where)
        found = llm.generate(prompts, params, on_error="return")
        assert is_idle(llm)
        assert [output.failure for output in found] == [REASON if n in marked else None for n in range(30)]
        assert [said(found[number]) for number in innocent] == [said(output) for output in expected]
        for number, other in zip(innocent, expected, strict=True):
            assert len(found[number].prompt_logprobs or ()) == len(other.prompt_logprobs or ())
        assert 4 <= runner.failures < 4 * 6
        tokens = [len(answer.token_ids) for number in marked for answer in found[number].outputs]
        assert max(tokens) == 3, "what was said before stays"
        again = llm.generate(prompts[0], params[0])
        assert said(again[0]) == said(expected[0])


def test_a_marked_search_ends_with_one_answer_that_says_why(tiny_model: Path) -> None:
    with LLM(str(tiny_model), **OPTIONS) as llm:
        FailingRunner(llm)
        search, samples = llm.generate([[5, 6, 252]] * 2, [KINDS[3], KINDS[4]], on_error="return")
        assert said(search) == [([], "", "abort", REASON)]
        assert [(answer.finish_reason, answer.stop_reason) for answer in samples.outputs] == [("abort", REASON)] * 3
        assert is_idle(llm)


def test_every_way_to_ask_tells_it(tiny_model: Path) -> None:
    with LLM(str(tiny_model), **OPTIONS) as llm:
        FailingRunner(llm)
        good, bad = [5, 6, 7], [5, 250, 7]
        found = {item.request_id: item for item in llm.as_completed([("good", good, GREEDY), ("bad", bad, GREEDY)])}
        failed = found["bad"]
        assert isinstance(failed, FailedRequest) and isinstance(failed.error, RequestFailed)
        assert str(failed.error) == REASON and isinstance(found["good"], RequestOutput)
        with pytest.raises(RequestFailed, match=REASON):
            list(llm.stream(bad, GREEDY))
        with pytest.raises(RequestFailed, match=REASON):
            llm.score([(good, [9]), (bad, [9])])
        assert is_idle(llm)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters_are_loaded_again(tiny_model: Path, tmp_path: Path) -> None:
    path = make_adapter(tiny_model, tmp_path / "one", 1, r=3, target_modules=["q_proj", "v_proj"])
    with LLM(str(tiny_model), **OPTIONS, adapters={"one": str(path)}, max_adapters=1) as llm:
        prompts = [[5, 6, 7, number] for number in range(20, 26)]
        names = ["one", None] * 3
        expected = llm.generate(prompts, GREEDY, adapter=names)
        FailingRunner(llm, "before")
        loads = core_of(llm).scheduler.adapters.load_count
        found = llm.generate([*prompts, [5, 252]], GREEDY, adapter=[*names, "one"], on_error="return")
        assert [said(output) for output in found[:-1]] == [said(output) for output in expected]
        assert found[-1].failure == REASON
        assert core_of(llm).scheduler.adapters.load_count > loads


def test_ends_from_outside_while_others_are_on_trial(tiny_model: Path) -> None:
    """Also of those that are on trial: nobody waits for them."""
    prompts, params = crowd()
    with LLM(str(tiny_model), **OPTIONS) as llm:
        engine, runner = llm._engine, FailingRunner(llm)
        for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            engine.add(str(number), prompt, param)
        aborted = 0
        while engine.has_work:
            engine.step()
            if runner.failures in (2, 4) and engine.request_ids:
                engine.abort(engine.request_ids[:2])
                aborted += 2
            engine.core.scheduler.check_integrity()
        assert aborted and is_idle(llm)


def test_a_device_that_is_broken_for_good(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is to blame then: the engine raises, and leaves nothing behind."""
    with LLM(str(tiny_model), **OPTIONS) as llm:
        runner = FailingRunner(llm)

        def broken() -> None:
            raise RuntimeError("an illegal memory access")

        monkeypatch.setattr(runner, "abandon", broken)
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            llm.generate([[5, 6, 7], [5, 250, 7]], GREEDY)
        assert is_idle(llm)


def test_nothing_runs_behind_a_step_that_could_not_be_started() -> None:
    """Its rows would lack what that step was to bring."""

    class Runner:
        steps: ClassVar[list[int]] = []
        embeddings = None

        def execute(self, output: SchedulerOutput) -> Any:
            self.steps.append(output.step)
            if output.step == 2:
                raise RuntimeError("as planned")
            return Future[ModelRunnerOutput]()

        def abandon(self) -> None:
            self.steps.append(-1)

    executor = Executor(SimpleNamespace(runner=Runner()))  # type: ignore[arg-type]
    steps = [executor.submit(SchedulerOutput(step)) for step in (1, 2, 3)]
    for lost in steps[1:]:
        with pytest.raises(RuntimeError, match="as planned"):
            lost.result()
    executor.abandon()
    executor.submit(SchedulerOutput(4))
    assert Runner.steps == [1, 2, -1, 4]


# In the engine's process


def events(socket: "zmq.Socket[bytes]") -> Iterator[Any]:
    while True:
        assert socket.poll(30_000), "the engine is silent"
        message = decode_for_server(socket.recv())
        if isinstance(message, Events):
            yield from message.events


def test_one_that_cannot_be_queued(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoSearch(BeamSearch):
        def __init__(self, *arguments: Any) -> None:
            raise LookupError("no such\nbeam")

    monkeypatch.setattr(kvern.engine.beams, "BeamSearch", NoSearch)
    with LLM(str(tiny_model), **OPTIONS) as llm, zmq.Context() as context:
        here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        here.bind("inproc://engine")
        there.connect("inproc://engine")
        thread = threading.Thread(target=serve, args=(there, core_of(llm), os.getppid(), None, False, ""))
        thread.start()
        try:
            asks: list[AddRequest] = []
            for name, params in (("good", GREEDY), ("bad", KINDS[3])):
                asks.append(AddRequest(engine_of(llm).inputs.request(name, [5, 6, 7], params)))
            for ask in asks:
                here.send(encode(ask))
            ended: dict[str, Any] = {}
            for event in events(here):
                if event.finish_reason is not None:
                    ended[event.request_id] = event.stop_reason
                if len(ended) == 3:
                    break
            reason = "it cannot be queued: LookupError: no such beam"
            assert ended == {"good#0": None, "bad#0": reason, "bad#1": reason}
        finally:
            here.send(encode(Shutdown()))
            thread.join()
            here.close()
            there.close()
        assert not engine_of(llm).has_work


@pytest.fixture(scope="module")
def server(packages: None) -> Iterator[Served]:
    with serving(*SMALL, "--logits-processors", "break") as served:
        yield served


@pytest.mark.nightly
def test_a_server_answers_all_others(server: Served) -> None:
    """A processor that returns logits of another shape takes the whole step with it."""
    client = server.client()
    options: dict[str, Any] = {"model": "kvern-1m", "prompt": "Once", "seed": 5, "max_tokens": 60}
    expected = client.completions.create(**options).choices[0].text
    extra = {"logits_processors": {"break": {"how": "shape", "after": 3}}}
    streams = [client.completions.create(**options, stream=True) for _ in range(3)]
    texts = [next(stream).choices[0].text for stream in streams]
    with pytest.raises(openai.InternalServerError, match="its step failed: "):
        client.completions.create(**options, extra_body=extra)
    with pytest.raises(openai.APIError, match="its step failed: "):
        list(client.completions.create(**options, stream=True, extra_body=extra))
    for text, stream in zip(texts, streams, strict=True):
        assert text + "".join(chunk.choices[0].text for chunk in stream) == expected
    assert server.figure("engine_restarts_total") == 0
