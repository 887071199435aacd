"""Prompts that one engine computes and another answers: the tokens of one engine, whatever ends on the way."""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import openai
import pytest

from kvern import LLM, EngineConfig, SamplingParams
from kvern.cache.messages import TierMessage
from kvern.engine.core import EngineCore
from kvern.engine.hand_overs import HAND_OVER_SECONDS
from kvern.errors import ConfigError
from kvern.request.events import TokenEvent
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.serving.choice import LEAST_HANDED_OVER
from kvern.serving.client import EngineClient
from kvern.serving.replicas import Replica
from kvern.serving.workload import Generation
from kvern.tiers.host import HostStore
from tests.support.families import make_checkpoint
from tests.support.idle import core_here, is_idle
from tests.support.peft_adapters import make_adapter
from tests.support.served import ENGINE, KEY, PATIENCE, Served, children_of, command_of, eventually, serving
from tests.support.tiers import settle, tier_of

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory in /proc"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # within PEFT
]
OPTIONS: dict[str, Any] = {"threads": 1, "dtype": "float32", "kv_cache_tokens": 4096}
HANDED: dict[str, Any] = {
    **OPTIONS,
    "prefill_engines": 1,
    "decode_engines": 1,
    "kv_tier": ("host:64MB", "peer"),
    "max_batch_tokens": 128,
}
"""Long prompts are computed in parts."""
LONG = [[10 + (number + place * 7) % 110 for place in range(150 + 20 * number)] for number in range(4)]
SHORT = [5, 6, 7]
PAGES = 128
"""Tokens of the whole pages of the shortest of the long prompts."""
FAMILIES = [
    "qwen3_5",
    *(
        pytest.param(name, marks=pytest.mark.nightly)
        for name in ("llama", "gemma3", "deepseek_v3", "gpt_oss", "nemotron_h")
    ),
]


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are handed over that are shorter than usual."""
    monkeypatch.setattr("kvern.serving.choice.LEAST_HANDED_OVER", 100)


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny_model, tmp_path_factory.mktemp("adapters") / "one", 0, r=4)


def replicas(llm: LLM) -> list[Replica]:
    engine: Any = llm._engine
    return list(engine.client.replicas)


KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, logprobs=3),
    "sampled": SamplingParams(temperature=0.9, seed=4, max_tokens=12, presence_penalty=0.5, min_tokens=5),
    "several": SamplingParams(temperature=0.9, seed=4, max_tokens=8, n=3),
    "beams": SamplingParams(beam_width=3, max_tokens=6),
    "structured": SamplingParams(temperature=0.9, seed=4, max_tokens=12, structured_outputs={"regex": "[a-d]{8}"}),
    "stopped": SamplingParams(temperature=0.9, seed=4, max_tokens=30, stop=["a"]),
    "adapted": SamplingParams(temperature=0, max_tokens=12),
}


@pytest.fixture(scope="module")
def alone(tiny_model: Path, adapter: Path) -> Iterator[LLM]:
    """One engine."""
    with LLM(str(tiny_model), adapters={"one": str(adapter)}, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def handed(tiny_model: Path, adapter: Path) -> Iterator[LLM]:
    """An engine that computes prompts and one that answers; tests leave nothing running."""
    with LLM(str(tiny_model), adapters={"one": str(adapter)}, **HANDED) as llm:
        yield llm


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_one_engine(alone: LLM, handed: LLM, kind: str) -> None:
    number, name = [*KINDS].index(kind), "one" if kind == "adapted" else None
    prompts = [[20 + number, *prompt] for prompt in LONG]
    prefill, decode = replicas(handed)
    assert prefill.is_prefill and not decode.is_prefill
    asked, computed = prefill.statistics.requests, decode.statistics.prefill_tokens
    hits = decode.statistics.stores["peer"].hit_tokens if decode.statistics.stores else 0
    expected = alone.generate([*prompts, SHORT], KINDS[kind], adapter=name)
    found = handed.generate([*prompts, SHORT], KINDS[kind], adapter=name)
    for output, other in zip(found, expected, strict=True):
        assert [answer.token_ids for answer in output.outputs] == [answer.token_ids for answer in other.outputs]
        assert [answer.finish_reason for answer in output.outputs] == [one.finish_reason for one in other.outputs]
    assert prefill.statistics.requests == asked + len(LONG)
    assert decode.statistics.stores["peer"].hit_tokens >= hits + len(LONG) * PAGES
    assert decode.statistics.prefill_tokens <= computed + 64 * len(LONG) + len(SHORT)
    assert all(not one.workload.running and not one.workload.tokens for one in (prefill, decode))


def test_what_pays_nothing_stays_where_it_is_answered(alone: LLM, handed: LLM) -> None:
    """Prompts whose log-probabilities are wanted, those that are cached, and texts for embeddings."""
    prefill, _ = replicas(handed)
    fresh = [30, *LONG[0]]
    handed.generate(fresh, KINDS["greedy"])
    asked = prefill.statistics.requests
    handed.generate([*fresh, 40, 41], KINDS["greedy"])
    whole = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
    [found], [expected] = (llm.generate([[31, *LONG[1]]], whole) for llm in (handed, alone))
    assert found.prompt_logprobs is not None and found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert prefill.statistics.requests == asked


def test_the_other_engine_is_told_of_parts(alone: LLM, handed: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, _ = replicas(handed)
    brought, bring = list[str](), prefill.workload.stored
    assert bring is not None

    def noted(generation: Generation) -> None:
        brought.append(generation.output.request_id)
        part, whole = generation.stored_part().prompt.token_ids, generation.spec.prompt.token_ids
        assert part == whole[: generation.stored_tokens + 1] and len(part) > 64, "more is not there yet"
        bring(generation)

    monkeypatch.setattr(prefill.workload, "stored", noted)
    prompts = [[40 + number, *prompt] for number, prompt in enumerate(LONG)]
    found, expected = (llm.generate(prompts, KINDS["sampled"]) for llm in (handed, alone))
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    assert brought, "those whose first part has a whole page"


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """Windows, states, latents."""
    model = str(make_checkpoint(family, tmp_path))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(model, **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(LONG, params)]
    with LLM(model, **HANDED) as llm:
        prefill, decode = replicas(llm)
        found = llm.generate(LONG, params)
        assert [output.outputs[0].token_ids for output in found] == expected
        assert prefill.statistics.requests == len(LONG)
        assert decode.statistics.stores["peer"].hit_tokens >= PAGES


def engines(server: int) -> list[int]:
    """The processes of a server's engines."""
    return [child for child in children_of(server) if ENGINE in command_of(child)]


async def begun(client: EngineClient, prompt: list[int], length: int = 40) -> Generation:
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=length, ignore_eos=True)
    return await client.replicas.submit(prompt, params, news=asyncio.Event())


async def tokens_of(client: EngineClient, generation: Generation) -> list[int]:
    async for _ in client.replicas.follow([generation], generation.news):
        pass
    return generation.output.outputs[0].token_ids


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


def tokens(generations: Sequence[Generation]) -> int:
    return sum(len(generation.output.outputs[0].token_ids) for generation in generations)


@pytest.mark.parametrize("times", [6, pytest.param(50, marks=pytest.mark.nightly)])
def test_an_engine_that_is_killed_or_stands_still_is_not_felt(tiny_model: Path, times: int) -> None:
    """At any point: while prompts are computed, handed over, answered. Nothing is held afterwards."""
    chance = random.Random(times)
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=40, ignore_eos=True)

    async def run() -> list[tuple[list[int], list[int]]]:
        found = []
        async with EngineClient(EngineConfig(str(tiny_model), **HANDED)) as client:
            for number in range(times):
                prompts = [[number, *prompt] for prompt in LONG]
                generations = [await begun(client, prompt) for prompt in prompts]
                point = chance.randrange(40 * len(LONG)) if chance.random() < 0.6 else 0
                await until(lambda at=point, begun=generations: tokens(begun) >= at)  # type: ignore[misc]
                how = signal.SIGSTOP if number % 10 == 9 else signal.SIGKILL
                os.kill(chance.choice(sorted(engines(os.getpid()))), how)
                answers = await asyncio.gather(*(tokens_of(client, generation) for generation in generations))
                found += zip(prompts, answers, strict=True)
                await until(lambda: all(replica.accepts for replica in client.replicas))
            await until(lambda: not any(replica.statistics.running for replica in client.replicas))
            assert not any(replica.workload.running or replica.workload.tokens for replica in client.replicas)
        return found

    found = asyncio.run(run())
    with LLM(str(tiny_model), **OPTIONS) as llm:
        expected = llm.generate([prompt for prompt, _ in found], params)
    assert [answer for _, answer in found] == [output.outputs[0].token_ids for output in expected]


@pytest.mark.nightly
def test_the_pool_that_is_left_does_both(tiny_model: Path) -> None:
    """A client that goes while its prompt is computed frees it."""

    async def run() -> None:
        async with EngineClient(EngineConfig(str(tiny_model), **HANDED)) as client:
            prefill, decode = client.replicas
            for process in engines(os.getpid()):
                os.kill(process, signal.SIGSTOP)
            try:
                left, stays = [await begun(client, prompt) for prompt in LONG[:2]]
                assert {*prefill.workload.running.values()} == {left, stays} and not decode.workload.running
                client.replicas.abort([left])
                assert [*prefill.workload.running.values()] == [stays]
                asked = decode.statistics.requests
                removed = asyncio.create_task(client.replicas.remove("0", 0))
                await until(lambda: stays in decode.workload.running.values())
            finally:
                for process in engines(os.getpid()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGCONT)
            await removed
            answer = await tokens_of(client, stays)
            assert client.replicas.degraded and answer == await tokens_of(client, await begun(client, LONG[1]))
            await until(lambda: decode.statistics.requests == asked + 2)
            added = await client.replicas.add()
            assert added.is_prefill and not client.replicas.degraded

    asyncio.run(run())


def test_the_end_of_a_prompt_is_told_when_it_is_stored(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or after a while, if a store has no room for them."""
    prompt = PromptInput(LONG[0])
    with LLM(str(tiny_model), **OPTIONS, kv_tier=("host:8MB",)) as llm:
        core, tier = core_here(llm), tier_of(llm)
        spec = RequestSpec("r", prompt, ResolvedParams(temperature=0.9), 30, seed=5).prompt_alone()
        core.add(spec)
        events = until_told(core)
        assert [(event.request_id, event.finish_reason) for event in events] == [("r#0", "length")]
        assert tier.figures()["host"].stored_tokens >= PAGES and not core.has_work
        now, hangs = 0.0, threading.Event()
        monkeypatch.setattr(core, "_clock", lambda: now)
        monkeypatch.setattr(tier.shelf, "_seal", lambda *_: hangs.wait())
        core.add(msgspec.structs.replace(spec, request_id="s", prompt=PromptInput(LONG[1])))
        for _ in range(20):
            assert not core.step()
        now = HAND_OVER_SECONDS
        [event] = until_told(core)
        assert (event.request_id, lacking(event)) == ("s#0", PAGES)
        hangs.set()
        assert is_idle(llm)


@pytest.mark.parametrize(("family", "parts"), [("llama", [64, 128, 192]), ("gemma3", []), ("qwen3_5", [])])
def test_parts_are_told_as_they_are_stored(family: str, parts: list[int], tmp_path: Path) -> None:
    """Unless windows or a state are needed beside them, which are those of another place."""
    with LLM(str(make_checkpoint(family, tmp_path)), **CHUNKS, kv_tier=("host:32MB",)) as llm:
        core = core_here(llm)
        core._clock = lambda: 0.0
        core.add(RequestSpec("r", PromptInput(LONG[3]), ResolvedParams(), 30).prompt_alone(tells_parts=True))
        *told, last = until_told(core)
        assert [event.stored_tokens for event in told] == parts and not any(event.finish_reason for event in told)
        assert last.finish_reason == "length" and not last.stored_tokens
        assert is_idle(llm)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [[146], [64], [95], [93]]),
        ("gemma3", [[210], [95], [93]]),
        ("qwen3_5", [[192], [18], [64], [31], [64], [29]]),
    ],
)
def test_the_last_part_is_a_small_one(
    family: str, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless nothing is loaded meanwhile: of windows and states."""
    monkeypatch.setattr("kvern.cache.shared_prompt.LAST_PART", 64)
    with LLM(str(make_checkpoint(family, tmp_path)), **OPTIONS, kv_tier=("host:32MB",)) as llm:
        core, computed = core_here(llm), list[list[int]]()
        core._clock, submit = (lambda: 0.0), core.executor.submit

        def noted(output: SchedulerOutput) -> StepResult:
            if output.scheduled:
                computed.append([item.count for item in output.scheduled])
            return submit(output)

        core.executor.submit = noted  # type: ignore[method-assign]
        for number, prompt in enumerate((LONG[3], LONG[3][5:100], LONG[3][7:100])):
            core.add(
                RequestSpec(f"r{number}", PromptInput(prompt), ResolvedParams(), 30).prompt_alone(tells_parts=True)
            )
            until_told(core)
        assert computed == expected


def lacking(event: TokenEvent) -> int:
    """The tokens that no store has, as is told."""
    return 0 if event.stop_reason is None else int(str(event.stop_reason).split()[3])


CHUNKS: dict[str, Any] = {**OPTIONS, "max_batch_tokens": 64, "block_size": 16}


def dropped(store: HostStore) -> int:
    """Makes room for others as they would; how many pages left."""
    names = [*store._pages]
    store.drop(names)
    return len(names)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_pages_that_left_the_store_meanwhile_are_put_again(family: str, tmp_path: Path) -> None:
    """Those of a prompt that is still computed, or whose end is awaited, as far as the device has them."""
    with LLM(str(make_checkpoint(family, tmp_path)), **CHUNKS, kv_tier=("host:32MB",)) as llm:
        core, tier = core_here(llm), tier_of(llm)
        core._clock = lambda: 0.0
        [store] = [one.store for one in tier.shelf.stores]
        assert isinstance(store, HostStore)
        core.add(RequestSpec("r", PromptInput(LONG[3]), ResolvedParams(), 30).prompt_alone())
        left = 0
        while not left:
            assert not core.step(), "the prompt is computed in parts"
            eventually(lambda: tier.shelf.is_quiet)
            left = dropped(store)
        [event] = until_told(core)
        assert lacking(event) == 0
        assert tier.figures()["host"].stored_tokens >= 192 + 64
        assert is_idle(llm)


class Flying:
    """Steps of a device that computes while the host does other things: a result that is awaited has come then."""

    def __init__(self, core: EngineCore) -> None:
        self.submit, self.awaited = core.executor.submit, 0
        self.computed: list[list[str]] = []
        """The requests of each step that computed something."""
        self.saved_late = 0
        """Pages that a step before wrote."""
        core.executor.submit = self._submit  # type: ignore[method-assign]

    def _submit(self, output: SchedulerOutput) -> StepResult:
        if (message := output.message(TierMessage)) is not None:
            self.saved_late += len(message.saves)
        if output.scheduled:
            self.computed.append(output.request_ids)
        return FlyingStep(self, self.submit(output))


class FlyingStep(NamedTuple):
    steps: Flying
    step: StepResult

    def done(self) -> bool:
        return False

    def result(self) -> ModelRunnerOutput:
        self.steps.awaited += 1
        return self.step.result()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_end_is_told_while_the_next_steps_compute_other_prompts(family: str, depth: int, tmp_path: Path) -> None:
    """No step is awaited between the last of a prompt, which writes a page, and its end."""
    options = {**CHUNKS, "max_batch_tokens": 100}
    with LLM(str(make_checkpoint(family, tmp_path)), **options, kv_tier=("host:32MB",)) as llm:
        core, shelf, may_save = core_here(llm), tier_of(llm).shelf, threading.Event()
        core._clock, core._depth, seal = lambda: 0.0, depth, shelf._seal
        shelf._seal = lambda *given: may_save.wait() and seal(*given)  # type: ignore[method-assign]
        steps = Flying(core)
        for name, prompt in (("first", LONG[0][:140]), ("second", LONG[3])):
            core.add(RequestSpec(name, PromptInput([7, *prompt]), ResolvedParams(), 30).prompt_alone())
        while not core._handing.awaiting:
            assert not core.step()
        awaited, begun = steps.awaited, len(steps.computed)
        for _ in range(5):
            assert not core.step()
        assert steps.awaited == awaited and len(steps.computed) == begun + depth - 1
        assert "second#0" in steps.computed[-1], "the other prompt is not computed yet"
        may_save.set()
        eventually(lambda: shelf.is_quiet)
        [event] = core.step()
        assert event.request_id == "first#0" and not lacking(event)
        assert [event.request_id for event in until_told(core)] == ["second#0"]
        assert not steps.saved_late and is_idle(llm)


def test_pages_for_which_a_store_has_no_room_are_not_awaited(tiny_model: Path) -> None:
    """What another engine will not find is told, and the first pages are kept of a prompt that is too long."""
    with LLM(str(tiny_model), **CHUNKS, kv_tier=("host:100KB",)) as llm:
        core, tier = core_here(llm), tier_of(llm)
        core._clock = lambda: 0.0
        spec = RequestSpec("r", PromptInput(LONG[3]), ResolvedParams(), 30).prompt_alone()
        core.add(spec)
        [event] = until_told(core)
        assert tier.figures()["host"].evicted_pages
        assert 0 < lacking(event) < 192
        core.add(msgspec.structs.replace(spec, request_id="s"))
        tier.shelf.has_room = lambda *_: False  # type: ignore[method-assign]
        [event] = until_told(core)
        assert lacking(event) and is_idle(llm)


def until_told(core: EngineCore) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    until = time.monotonic() + 20
    while core.has_work:
        events += core.step()
        assert time.monotonic() < until
    return events


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prefill_engines": 1}, "give at least 1 of each, or neither"),
        ({"prefill_engines": -1, "decode_engines": 1}, "give at least 1 of each"),
        ({"prefill_engines": 1, "decode_engines": 2, "data_parallel_size": 2}, "leave it out, or make it 3"),
        ({"prefill_engines": 1, "decode_engines": 2, "prefix_cache": False}, "turn prefix_cache on"),
        ({"prefill_engines": 1, "decode_engines": 2, "executor": "ray"}, "a store that all nodes reach"),
        (
            {"prefill_engines": 1, "decode_engines": 2, "tensor_parallel_size": 2, "enable_dp_attention": True},
            "leave one out",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(**options)


def test_options_make_engines_and_a_tier() -> None:
    config = EngineConfig(prefill_engines=1, decode_engines=3)
    assert (config.data_parallel_size, config.kv_tier) == (4, ("host", "peer"))
    assert EngineConfig(prefill_engines=1, decode_engines=3, data_parallel_size=4).data_parallel_size == 4
    named = EngineConfig(prefill_engines=1, decode_engines=3, kv_tier=("host:1GB", "disk:/pages"))
    assert named.kv_tier == ("host:1GB", "peer", "disk:/pages")
    shared = EngineConfig(prefill_engines=1, decode_engines=1, kv_tier=("disk:/pages",))
    assert shared.kv_tier == ("disk:/pages",)


def test_a_server_of_both_kinds(tiny_model: Path, tmp_path: Path) -> None:
    """Long prompts through HTTP; the prefill engine is replaced by another."""
    (tmp_path / "keys").write_text(f"admin:{KEY} admin=1\n")
    text = "Once upon a time there was a little dog who had a red ball. " * 8
    options = "--model", str(tiny_model), "--served-model-name", "tiny", "--threads", "1", "--dtype", "float32"
    with LLM(str(tiny_model), threads=1, dtype="float32") as llm:
        [output] = llm.generate(text, SamplingParams(max_tokens=20, temperature=0))
        expected = output.outputs[0].text
    keys = "--api-key-file", str(tmp_path / "keys")
    with serving(*options, *keys, "--prefill-engines", "1", "--decode-engines", "1") as served:
        assert answer_of(served, text) == expected
        assert served.figure("tier_hit_tokens_total", store="peer", engine="1") >= LEAST_HANDED_OVER - 64
        assert served.figure("prompts_handed_over_total", engine="0") == 1
        name = served.client().completions.create(model="tiny", prompt=f"And {text}", max_tokens=4).id
        explained = served.raw("GET", f"/v1/requests/{name}/explain")[2]
        assert "prefill" in {part["cause"] for part in explained["causes"]} and not explained["moves"]
        [prompt] = explained["prompts"]
        assert prompt["engine"] == "0" and prompt["chunks"] and not prompt["cached"].get("peer")
        assert [one["engine"] for one in explained["records"]] == ["1"]
        told = served.raw("GET", "/ready")[2]
        assert "degraded" not in told
        roles = [("0", "prefill"), ("1", "decode")]
        assert [(one["engine"], one["role"]) for one in told["engines"]] == roles
        asked = json.dumps({"engine": "0", "grace_seconds": 0}).encode()
        assert served.raw("POST", "/v1/remove_engine", asked)[0] == 200
        assert "decode engines compute" in served.raw("GET", "/ready")[2]["degraded"]
        assert served.raw("POST", "/v1/add_engine", b"{}")[2]["id"] == "0"
        told = served.raw("GET", "/ready")[2]
        assert "degraded" not in told
        assert [(one["engine"], one["role"]) for one in told["engines"]] == roles
        before = served.figure("prompts_handed_over_total")
        answer_of(served, f"Then {text}")
        assert served.figure("prompts_handed_over_total") == before + 1


def answer_of(served: Served, text: str) -> str:
    client: openai.OpenAI = served.client()
    return client.completions.create(model="tiny", prompt=text, max_tokens=20, temperature=0).choices[0].text


def test_a_stream_that_moves_computes_little_again(tiny_model: Path) -> None:
    """Its pages are read from the memory of the engine that is removed."""
    options = {**OPTIONS, "data_parallel_size": 2, "kv_tier": ("host:64MB", "peer")}
    prompt = [[9, *LONG[0]], [8, *LONG[1]]]

    async def run() -> tuple[list[list[int]], int, int]:
        async with EngineClient(EngineConfig(str(tiny_model), **options)) as client:
            first, second = client.replicas
            generations = [await begun(client, each, 400) for each in prompt]
            moving = next(one for one in generations if one in first.workload.running.values())
            await until(lambda: tokens([moving]) >= 70)
            before = second.statistics.prefill_tokens
            await client.replicas.remove("0", 0)
            answers = await asyncio.gather(*(tokens_of(client, generation) for generation in generations))
            length = len(moving.spec.prompt.token_ids)
            return (
                answers,
                second.statistics.stores["peer"].hit_tokens - length,
                second.statistics.prefill_tokens - before,
            )

    answers, more, computed = asyncio.run(run())
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=400, ignore_eos=True)
    with LLM(str(tiny_model), **OPTIONS) as llm:
        assert answers == [output.outputs[0].token_ids for output in llm.generate(prompt, params)]
    assert more >= 0, "also pages of the answer"
    assert computed <= 2 * 64 + len(prompt[1]), "the rest of a page, and the other prompt"


@pytest.mark.nightly
def test_an_adapter_that_is_unloaded_stays_for_prompts_on_their_way(tiny_model: Path, adapter: Path) -> None:
    options = {**HANDED, "adapters": {"one": str(adapter)}}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    async def run() -> list[int]:
        async with EngineClient(EngineConfig(str(tiny_model), **options)) as client:
            processes = engines(os.getpid())
            for process in processes:
                os.kill(process, signal.SIGSTOP)
            try:
                generation = await client.replicas.submit(LONG[0], params, news=asyncio.Event(), adapter="one")
                client.replicas.adapters.unload("one")
            finally:
                for process in processes:
                    os.kill(process, signal.SIGCONT)
            answer = await tokens_of(client, generation)
            assert all(replica.adapters.known == {None} for replica in client.replicas)
            return answer

    answer = asyncio.run(run())
    with LLM(str(tiny_model), adapters={"one": str(adapter)}, **OPTIONS) as llm:
        assert answer == llm.generate([LONG[0]], params, adapter="one")[0].outputs[0].token_ids


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_no_end_is_awaited_that_is_never_stored(family: str, tmp_path: Path) -> None:
    """Prompts that end with a page, and pages that are cached on the device and left the store."""
    now = 0.0
    with LLM(str(make_checkpoint(family, tmp_path)), **OPTIONS, kv_tier=("host:32MB",)) as llm:
        core, tier = core_here(llm), tier_of(llm)
        core._clock = lambda: now
        for number, length in enumerate((127, 128, 129, 192, 128, 192)):
            ids = [5 + place * 7 % 100 for place in range(length)]
            spec = RequestSpec(f"r{number}", PromptInput(ids), ResolvedParams(), 30).prompt_alone()
            core.add(spec)
            assert [event.request_id for event in until_told(core)] == [f"r{number}#0"], "the clock stands still"
            if number == 3:
                settle(llm)
                for store in tier.shelf.stores:
                    assert isinstance(store.store, HostStore)
                    store.store.drop([*store.store._pages])
        assert tier.figures()["host"].stored_tokens >= 192 + 128
