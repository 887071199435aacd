"""LLM and batch jobs over several engines: the answers of one, in order, whatever becomes of an engine meanwhile."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, EngineConfig, SamplingParams
from kvern.engine.engine import Engine
from kvern.errors import ConfigError, EngineClosed, EngineUnavailable, InvalidRequest, RequestFailed
from kvern.llm import FailedRequest
from kvern.request.request import RequestOptions
from kvern.serving.several import SeveralEngines
from kvern.serving.wire import CacheChanges
from tests.support.batch_files import read_rows, run, write_rows
from tests.support.internals import engine_of
from tests.support.peft_adapters import make_adapter
from tests.support.served import eventually

PARAMS = SamplingParams(temperature=0.8, seed=9, max_tokens=60, ignore_eos=True)
PROMPTS = [[10 + number, 20, 30] for number in range(12)]
ROWS = [{"prompt": f"the fox {index}", "max_tokens": 60, "ignore_eos": True} for index in range(80)]


@pytest.fixture(scope="module")
def one(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), threads=1, max_batch_requests=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), threads=1, max_batch_requests=8, max_adapters=1, data_parallel_size=2) as llm:
        yield llm


def engines(llm: LLM) -> list[Any]:
    assert isinstance(engine_of(llm), SeveralEngines)
    return list(engine_of(llm).client.replicas)


def threads_of_engines() -> int:
    return sum(thread.name.startswith("kvern-engines") for thread in threading.enumerate())


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_two_engines_answer_as_one(one: LLM, two: LLM) -> None:
    expected = one.generate(PROMPTS, PARAMS)
    assert tokens(two.generate(PROMPTS, PARAMS, progress=True)) == tokens(expected)
    assert [engine.statistics.generation_tokens for engine in engines(two)] == [6 * 60] * 2
    assert two.statistics().generation_tokens == 12 * 60
    for output in two.stream(PROMPTS[0], PARAMS):
        last = output
    assert last.outputs[0].text == expected[0].outputs[0].text
    next(two.stream(PROMPTS[0], PARAMS)).finished  # noqa: B018 (leaving aborts it)
    eventually(lambda: two.statistics().running == 0)
    assert two.score([("a fox", " and")]) == one.score([("a fox", " and")])
    before = two.statistics().requests
    with pytest.raises(InvalidRequest, match="token id 99999"):
        two.generate([[5], [99999]], PARAMS)
    assert two.statistics().requests == before
    with pytest.raises(InvalidRequest, match="adapter"):
        two.generate([5], PARAMS, adapter="none")
    assert two.spec == one.spec


def test_engines_get_shares_of_the_work(one: LLM, two: LLM) -> None:
    """However long the answers that come first, where their lengths are certain; elsewhere prompts count alone."""
    lengths = [20, 40, 40, 40, 160, 20]
    before = [engine.statistics for engine in engines(two)]
    params = [PARAMS.replace(max_tokens=length) for length in lengths]
    outputs = two.generate(PROMPTS[: len(lengths)], params)
    assert tokens(outputs) == tokens(one.generate(PROMPTS[: len(lengths)], params))
    now = [engine.statistics for engine in engines(two)]
    assert [new.generation_tokens - old.generation_tokens for new, old in zip(now, before, strict=True)] == [160, 160]
    assert sorted(new.requests - old.requests for new, old in zip(now, before, strict=True)) == [1, 5]
    ending = PARAMS.replace(ignore_eos=False)
    prompts = [[10 + number] * length for number, length in enumerate(lengths)]
    two.generate(prompts, [ending.replace(max_tokens=length) for length in lengths[::-1]])
    later = [engine.statistics for engine in engines(two)]
    assert [new.requests - old.requests for new, old in zip(later, now, strict=True)] == [3, 3]


@pytest.mark.nightly
def test_a_target_of_single_tokens_is_for_those_who_ask_for_it(tiny_model: Path, two: LLM) -> None:
    """Nobody waits for single tokens of a script."""
    assert two.statistics().target_itl == 0
    assert {engine.supervisor._config.target_itl for engine in engines(two)} == {"none"}
    with LLM(str(tiny_model), threads=1, data_parallel_size=2, target_itl="15ms") as llm:
        llm.generate(PROMPTS[:2], PARAMS)
        assert llm.statistics().target_itl == 0.015


def test_a_killed_engine_loses_no_row(one: LLM, two: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a job that is interrupted and goes on with one engine: the same file, row for row."""
    source = write_rows(tmp_path / "in.jsonl", ROWS)
    run(one, source, tmp_path / "whole.jsonl")
    link = engines(two)[0].supervisor.link

    def killing(inputs: Any) -> Iterator[Any]:
        for number, output in enumerate(LLM.as_completed(two, inputs)):
            if number == 10:
                link.process.kill()
            yield output

    with monkeypatch.context() as patch:
        patch.setattr(two, "as_completed", killing)
        result = run(two, source, tmp_path / "out.jsonl")
    assert (result.totals.rows, result.totals.failed) == (80, 0)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()

    def interrupting(inputs: Any) -> Iterator[Any]:
        for number, output in enumerate(LLM.as_completed(two, inputs)):
            if number == 40:
                raise KeyboardInterrupt
            yield output

    with monkeypatch.context() as patch:
        patch.setattr(two, "as_completed", interrupting)
        cut = run(two, source, tmp_path / "cut.jsonl")
    assert cut.interrupted and cut.totals.failed == 0, cut.errors_path.read_text()
    assert 0 < len(read_rows(tmp_path / "cut.jsonl")) < 80
    resumed = run(one, source, tmp_path / "cut.jsonl")
    assert resumed.totals.failed == 0, resumed.errors_path.read_text()
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    eventually(lambda: two.statistics() is not None and all(engine.supervisor.is_ready for engine in engines(two)))


def test_what_is_aborted_before_a_step_goes_to_nobody(two: LLM) -> None:
    expected, engine = tokens(two.generate(PROMPTS[2:], PARAMS)), engine_of(two)
    before = two.statistics().requests
    outputs = [
        engine.add(str(number), prompt, PARAMS, RequestOptions(whole=True)) for number, prompt in enumerate(PROMPTS)
    ]
    engine.abort(["0", "1"])
    assert [output.outputs[0].finish_reason for output in outputs[:3]] == ["abort", "abort", None]
    while engine.has_work:
        engine.step()
    assert tokens(outputs[2:]) == expected
    assert two.statistics().requests == before + len(expected)
    engine.add("0", PROMPTS[0], PARAMS)
    engine.abort(["0"])
    assert not engine.has_work and engine.step() == []
    assert [(one.workload.tokens, one.workload.sequences) for one in engines(two)] == [(0, 0)] * 2


def test_answers_end_within_steps(two: LLM) -> None:
    """Not while nobody looks: who sees that an answer has ended may use its id at once, and another job does."""
    engine = engine_of(two)
    outputs = [
        engine.add(str(number), [5 + number], PARAMS.replace(max_tokens=length), RequestOptions(whole=True))
        for number, length in enumerate([1, 200])
    ]
    engine.step()
    eventually(lambda: engine.client.replicas.unfinished == 0)
    assert engine.request_ids == [output.request_id for output in outputs if not output.finished]
    while engine.has_work:
        engine.step()
    assert all(output.finished for output in outputs) and len(outputs[1].outputs[0].token_ids) == 200


def test_who_leaves_next_ends_what_an_interrupted_abort_has_left(two: LLM) -> None:
    engine, interrupted = engine_of(two), pytest.MonkeyPatch()

    def interrupting(work: Any) -> None:
        interrupted.undo()
        work.close()  # it is cancelled before it has begun
        raise KeyboardInterrupt

    stream = two.stream([5], PARAMS.replace(max_tokens=400))
    output = next(stream)
    interrupted.setattr(engine._thread, "wait", interrupting)
    with pytest.raises(KeyboardInterrupt):
        stream.close()
    two.generate([6], PARAMS.replace(max_tokens=1))
    assert output.finished and not engine.has_work and not engine._outputs and not engine.client.replicas.unfinished


def test_a_step_that_is_interrupted_loses_no_news(two: LLM) -> None:
    """The thread that makes steps may be interrupted, and another one goes on with its own answers."""
    engine = engine_of(two)
    outputs = [engine.add(str(number), [5 + number], PARAMS, RequestOptions(whole=True)) for number in range(2)]
    interrupted = pytest.MonkeyPatch()

    def interrupting(*_: Any) -> Any:
        interrupted.undo()
        raise KeyboardInterrupt

    engine._thread.wait(engine._begin())
    eventually(lambda: engine.client.replicas.unfinished == 0)
    interrupted.setattr(engine, "_grown", interrupting)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.has_work:
        engine.step()
    assert tokens(outputs) == tokens(two.generate([[5], [6]], PARAMS))


def test_a_request_whose_addition_is_interrupted_is_forgotten(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(two)
    replicas, wait = engine.client.replicas, engine._thread.wait

    def interrupted(work: Any) -> None:
        wait(work)
        assert replicas.unfinished == 1 and replicas.turns.waiting("") == 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._thread, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.add("0", PROMPTS[0], PARAMS)
    eventually(lambda: not replicas.unfinished and not replicas.turns.waiting(""))
    assert not engine.has_work


def test_the_reason_is_known_before_an_answer_ends(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may look in between."""
    engine = engine_of(two)
    replicas, error = engine.client.replicas, RequestFailed("it was alone when engines died")
    output = engine.add("0", PROMPTS[0], PARAMS.replace(max_tokens=200))
    [generation] = engine._generations.values()
    abort, seen = replicas.outputs.abort, list[Any]()

    def looking(ids: Any) -> None:
        abort(ids)
        seen.append((generation.output.finished, generation.error))

    async def end() -> None:
        await engine._begin()
        generation.workload.end(generation, error)

    with monkeypatch.context() as patch:
        patch.setattr(replicas.outputs, "abort", looking)
        engine._thread.wait(end())
    assert seen == [(True, error)]
    engine.step()
    assert output.failure == str(error) and not engine.has_work


@pytest.mark.nightly
def test_an_engine_that_dies_before_a_step_is_passed_by(two: LLM) -> None:
    expected, first = tokens(two.generate(PROMPTS, PARAMS)), engines(two)[0]

    def inputs() -> Iterator[Any]:
        yield from ((str(number), prompt, PARAMS) for number, prompt in enumerate(PROMPTS[:6]))
        first.supervisor.link.process.kill()
        eventually(lambda: two.statistics() is not None and not first.supervisor.is_ready)
        yield from ((str(number), prompt, PARAMS) for number, prompt in enumerate(PROMPTS[6:], 6))

    found = sorted(two.as_completed(inputs()), key=lambda one: int(one.request_id))
    assert tokens(found) == expected
    eventually(lambda: two.statistics() is not None and first.supervisor.is_ready)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_an_adapter_that_is_lost_before_a_step_ends_its_requests(tiny_model: Path, two: LLM, tmp_path: Path) -> None:
    """No engine is given what it does not know."""
    adapter = make_adapter(tiny_model, tmp_path / "adapter", 0, r=4)
    two.load_adapter("one", str(adapter))
    expected = two.generate(PROMPTS[0], PARAMS)

    def inputs() -> Iterator[Any]:
        yield "adapted", PROMPTS[0], PARAMS, "one"
        adapter.rename(tmp_path / "away")
        engines(two)[0].supervisor.link.process.kill()
        eventually(lambda: two.statistics() is not None and not two.adapters)
        yield "plain", PROMPTS[0], PARAMS

    failed, plain = sorted(two.as_completed(inputs()), key=lambda one: one.request_id)
    assert isinstance(failed, FailedRequest) and "the adapter cannot be read again: " in str(failed.error)
    assert tokens([plain]) == tokens(expected)
    eventually(lambda: two.statistics() is not None and all(engine.supervisor.is_ready for engine in engines(two)))


def test_an_engine_of_which_messages_are_missing_tells_everything_again(two: LLM) -> None:
    client, replica = engine_of(two).client, engines(two)[0]
    eventually(lambda: two.statistics() is not None and all(engine.supervisor.is_ready for engine in engines(two)))
    two.generate([[7] * 300, [8] * 300], PARAMS)
    eventually(lambda: all(client.replicas.index.names_of(number) for number in range(2)))
    before = set(client.replicas.index.names_of(0))

    async def miss() -> None:
        replica.hear_cache(CacheChanges(10_000, [b"wrong"], []))
        assert not client.replicas.index.names_of(0)

    engine_of(two)._thread.wait(miss())
    eventually(lambda: client.replicas.index.names_of(0) == before)
    client.replicas.index.check_integrity()


@pytest.mark.nightly
def test_engines_that_do_not_start_again_end_the_job(tiny_model: Path, tmp_path: Path) -> None:
    """And leave what is done for the next one."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    before = threads_of_engines()
    llm = LLM(str(folder), threads=1, data_parallel_size=2)
    folder.rename(tmp_path / "away")
    for engine in engines(llm):
        os.kill(engine.supervisor.link.process._process.pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match="does not stay alive"):
        llm.generate(PROMPTS, PARAMS)
    llm.close()
    with pytest.raises(EngineClosed, match="the engine is closed"):
        llm.generate(PROMPTS, PARAMS)
    assert threads_of_engines() == before


@pytest.mark.nightly
def test_what_is_wrong_with_an_option_is_named(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 513, above the model's 512"):
        LLM(str(tiny_model), threads=1, data_parallel_size=2, max_model_len=513)


def test_a_single_engine_says_so(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size is 2, and this is one engine, in this process: leave it"):
        Engine(EngineConfig(str(tiny_model), data_parallel_size=2))
