"""Two engines behind one server: the answers of one, prompts where they are cached, and deaths that nobody sees."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pynvml
import pytest
import torch

from kvern import LLM, EngineConfig, SamplingParams
from kvern.cache.journal import NameLedger
from kvern.cache.prefix_names import ENDS, PIECE_TOKENS, prefix_names
from kvern.cli.main import main
from kvern.errors import ConfigError
from kvern.request.request import PromptInput, RequestSpec
from kvern.serving.client import EngineClient
from kvern.serving.places import gpu_count, places_of, visible_gpus
from kvern.serving.prefix_record import PrefixRecord
from kvern.serving.workload import Generation
from tests.support.peft_adapters import make_adapter
from tests.support.served import ENGINE, KEY, Served, children_of, command_of, eventually, serving

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT

COUNT, LENGTH, SHARED = 12, 200, 4 * PIECE_TOKENS
PROMPTS = [[10 + number, 20, 30] for number in range(COUNT)]
ASKED: dict[str, Any] = {"temperature": 0.8, "seed": 9, "extra_body": {"ignore_eos": True}}
ENGINES = ("0", "1")


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny_model, tmp_path_factory.mktemp("adapters") / "one", 0, r=4)


@pytest.fixture(scope="module")
def expected(tiny_model: Path, adapter: Path) -> dict[str | None, list[str]]:
    """Each prompt's text, of one engine that nobody disturbs, without and with the adapter."""
    params = SamplingParams(temperature=0.8, seed=9, max_tokens=LENGTH, ignore_eos=True)
    with LLM(str(tiny_model), threads=1, adapters={"one": str(adapter)}) as llm:
        answers = {name: llm.generate(PROMPTS, params, adapter=name) for name in (None, "one")}
    return {name: [output.outputs[0].text for output in outputs] for name, outputs in answers.items()}


def two_engines(model: Path, *arguments: str) -> contextlib.AbstractContextManager[Served]:
    options = "--model", str(model), "--served-model-name", "tiny", "--threads", "1", "-dp", "2"
    return serving(*options, *arguments)


@pytest.fixture
def served(tiny_model: Path, adapter: Path, tmp_path: Path) -> Iterator[Served]:
    keys = tmp_path / "keys"
    keys.write_text(f"admin:{KEY} admin=1\n")
    with two_engines(tiny_model, "--adapter-folder", str(adapter.parent), "--api-key-file", str(keys)) as server:
        yield server


def engines(served: Served) -> list[int]:
    """Their processes, in the order of their start."""
    return [child for child in children_of(served.process.pid) if ENGINE in command_of(child)]


def generated(served: Served) -> list[float]:
    return [served.figure("generation_tokens_total", engine=engine) for engine in ENGINES]


def cached(client: openai.OpenAI, prompt: list[int]) -> int:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, **ASKED)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def asked_at_once(
    served: Served, pool: concurrent.futures.Executor, prompts: list[list[int]], model: str = "tiny"
) -> list[Any]:
    """A stream for each prompt, of which none ends before all have begun."""
    client = served.client()

    def stream(prompt: list[int]) -> Any:
        return client.completions.create(model=model, prompt=prompt, max_tokens=LENGTH, stream=True, **ASKED)

    with served.held():
        return list(pool.map(stream, prompts))


class Streams:
    """The streams of all prompts, which have said something."""

    def __init__(self, served: Served, pool: concurrent.futures.Executor, model: str = "tiny") -> None:
        streams = asked_at_once(served, pool, PROMPTS, model)
        self._pool, self._streams = pool, [(next(stream).choices[0].text, stream) for stream in streams]

    def texts(self) -> list[str]:
        def whole(begun: tuple[str, Any]) -> str:
            return begun[0] + "".join(chunk.choices[0].text for chunk in begun[1])

        return list(self._pool.map(whole, self._streams))


def test_two_engines_answer_as_one(served: Served, expected: dict[str | None, list[str]]) -> None:
    client = served.client()
    shares_work_and_tells_who_did_it(served, client, expected)
    returns_to_where_a_prompt_is_cached(served, client)
    one_hot_prefix_is_for_all(served, client)
    both_know_adapters(served, client, expected)
    a_death_is_unseen(served, client, expected)


def shares_work_and_tells_who_did_it(
    served: Served, client: openai.OpenAI, expected: dict[str | None, list[str]]
) -> None:
    with concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
        assert Streams(served, pool).texts() == expected[None]
    assert generated(served) == [COUNT // 2 * LENGTH] * 2
    assert served.figure("engine_ready") == 2
    told = [{"model": "tiny", "engine": engine, "ready": True} for engine in ENGINES]
    assert served.raw("GET", "/ready")[2] == {"ready": True, "engines": told}
    with served.held():
        client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=400, stream=True, **ASKED).close()
        eventually(lambda: served.figure("request_success_total", finished_reason="abort") == 1)


def returns_to_where_a_prompt_is_cached(served: Served, client: openai.OpenAI) -> None:
    beginnings = [[100 + number] * SHARED for number in range(6)]
    before = generated(served)
    assert [cached(client, prompt) for prompt in beginnings] == [0] * 6
    assert all(after > one for after, one in zip(generated(served), before, strict=True)), "both caches fill"
    for turn in range(1, 3):
        longer = [[*prompt, *[50] * (turn * PIECE_TOKENS)] for prompt in beginnings]
        assert all(cached(client, prompt) >= SHARED for prompt in longer)


def one_hot_prefix_is_for_all(served: Served, client: openai.OpenAI) -> None:
    """Where it is cached more waits, in the end, than it spares."""
    hot, before = [99] * SHARED, generated(served)
    cached(client, hot)
    with concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
        streams = asked_at_once(served, pool, [[*hot, *prompt] for prompt in PROMPTS])
        list(pool.map(list, streams))
    assert all(after >= one + LENGTH for after, one in zip(generated(served), before, strict=True))


def both_know_adapters(served: Served, client: openai.OpenAI, expected: dict[str | None, list[str]]) -> None:
    body = json.dumps({"lora_name": "one", "lora_path": "one"}).encode()
    assert served.raw("POST", "/v1/load_lora_adapter", body)[0] == 200
    with concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
        before = generated(served)
        assert Streams(served, pool, "one").texts() == expected["one"]
        assert all(after > one for after, one in zip(generated(served), before, strict=True))


def a_death_is_unseen(served: Served, client: openai.OpenAI, expected: dict[str | None, list[str]]) -> None:
    """What ran in an engine that is killed goes on in the other at once; the next engine knows adapters, too."""
    for times, (name, model) in enumerate(((None, "tiny"), ("one", "one")), 1):
        with concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
            dead = engines(served)
            streams = Streams(served, pool, model)
            os.kill(dead[0], signal.SIGKILL)
            assert streams.texts() == expected[name]
        eventually(lambda times=times: served.figure("engine_restarts_total") == times)  # type: ignore[misc]
        eventually(lambda: served.figure("engine_ready") == 2)
        assert dead[1] in engines(served)
    restarts = sorted(served.figure("engine_restarts_total", engine=engine) for engine in ENGINES)
    assert sum(restarts) == 2
    with concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
        before = generated(served)
        assert Streams(served, pool, "one").texts() == expected["one"]
        assert all(after > one for after, one in zip(generated(served), before, strict=True))
    assert served.raw("POST", "/v1/unload_lora_adapter", json.dumps({"lora_name": "one"}).encode())[0] == 200
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="one", prompt=[5, 6])


@pytest.mark.nightly
@pytest.mark.sample(1)
@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_engines_come_and_go_while_streams_run(
    tiny_model: Path,
    adapter: Path,
    tmp_path: Path,
    expected: dict[str | None, list[str]],
    capsys: pytest.CaptureFixture[str],
    again: bool,
) -> None:
    """`again`: the one that is left is killed and gets another beside it, which takes over in turn."""
    keys = tmp_path / "keys"
    keys.write_text(f"admin:{KEY} admin=1\nuser:{KEY}-user\n")
    options = "--model", str(tiny_model), "--served-model-name", "tiny", "--threads", "1", "--api-key-file", str(keys)
    one = f"one={adapter}"
    with serving(*options, "--adapter", one) as served, concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
        refuses_engines_to_some_and_the_last_to_all(served)
        streams = Streams(served, pool)
        assert asked(served, "add_engine") == (200, {"id": "1", "object": "engine", "model": "tiny", "ready": True})
        assert streams.texts() == expected[None]
        assert main(["engines", "--base-url", served.url.removesuffix("/v1"), "--api-key", KEY]) == 0
        assert capsys.readouterr().out == "0: takes requests\n1: takes requests\n"
        before = generated(served)
        assert Streams(served, pool, "one").texts() == expected["one"], "a new engine knows adapters"
        assert all(after > one for after, one in zip(generated(served), before, strict=True))
        assert len(engines(served)) == 2
        earlier = {*engines(served)}
        streams = Streams(served, pool)
        address = "--base-url", served.url.removesuffix("/v1"), "--api-key", KEY
        assert main(["engines", "restart", *address, "--grace-seconds", "0"]) == 0
        told = [f"engine {name} {what}\n" for name in ENGINES for what in ("has ended", "takes requests")]
        assert capsys.readouterr().out == "".join(told)
        assert streams.texts() == expected[None] and not earlier & {*engines(served)}
        streams = Streams(served, pool)
        assert asked(served, "remove_engine", engine="0", grace_seconds=0)[0] == 200
        assert streams.texts() == expected[None], "what ran there goes on elsewhere"
        assert len(engines(served)) == 1
        assert served.raw("GET", "/ready")[2]["engines"] == [{"model": "tiny", "engine": "1", "ready": True}]
        assert served.figure("engine_ready") == served.figure("engine_ready", engine="1") == 1
        if again:
            streams = Streams(served, pool, "one")
            os.kill(engines(served)[0], signal.SIGKILL)
            assert streams.texts() == expected["one"]
            assert asked(served, "add_engine")[1]["id"] == "0", "its place is free again"
            streams = Streams(served, pool)
            assert asked(served, "remove_engine", engine="1", grace_seconds=60)[0] == 200
            assert streams.texts() == expected[None]
            assert served.figure("generation_tokens_total", engine="1") == 0


def asked(served: Served, what: str, key: str = KEY, **body: object) -> tuple[int, Any]:
    status, _, answer = served.raw("POST", f"/v1/{what}", json.dumps(body).encode(), key)
    return status, answer


def test_the_command_says_why_it_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in (
        (["remove"], "takes the name of an engine"),
        (["add", "1"], "takes no engine"),
        (["restart", "1"], "takes no engine"),
        (["list", "--base-url", "localhost"], "must begin with http"),
        (["list", "--base-url", "http://127.0.0.1:9"], "does not answer as kvern serve does"),
    ):
        assert main(["engines", *arguments]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "refused", "reason"),
    [
        ([{"model": "tiny", "engine": "0"}], (), "tiny has one engine: add another before"),
        ([], (), "has one engine: add another before"),
        (
            [{"model": name, "engine": one} for name in ("tiny", "other") for one in ENGINES],
            ("/v1/add_engine",),
            "engine 0 has ended, and none starts in its place: there is no room",
        ),
    ],
)
def test_engines_are_restarted_as_long_as_that_succeeds(
    told: list[dict[str, str]],
    refused: tuple[str, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = []

    def ask(self: object, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        paths.append(path)
        if path in refused:
            raise ConfigError("there is no room")
        return {"engines": told} if body is None else {"id": body["engine"]}

    monkeypatch.setattr("kvern.cli.remote.RemoteServer.ask", ask)
    assert main(["engines", "restart"]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
    assert paths == ["/ready", *(["/v1/remove_engine", "/v1/add_engine"] if refused else [])]


def test_a_model_of_another_name_is_answered_with_the_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"engines": [{"model": model, "engine": name} for model in ("tiny", "other") for name in ENGINES]}
    monkeypatch.setattr("kvern.cli.remote.RemoteServer.ask", lambda self, path: told)
    assert main(["engines", "restart", "--model", "alias"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "no engines are those of alias: models with several are tiny, other; name one" in said


def test_prefill_servers_are_listed_with_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"computed_prompts": 2, "computed_tokens": 600, "failed_prompts": 1}
    servers = [
        {"prefill_server": "a:1", "ready": True, **counts},
        {"prefill_server": "b:1", "ready": False, "reason": "it does not answer", **counts},
    ]
    told = {"ready": True, "prefill_servers": servers, "waits_for": ["prefill server b:1: it does not\x1b answer"]}
    monkeypatch.setattr("kvern.cli.remote.RemoteServer.ask", lambda self, path: told)
    assert main(["engines"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "0: takes requests",
        "prefill server a:1: takes prompts; computed 2 of 600 tokens, failed 1",
        "prefill server b:1: takes no prompts: it does not answer; computed 2 of 600 tokens, failed 1",
        "waits for prefill server b:1: it does not  answer",
    ]


def refuses_engines_to_some_and_the_last_to_all(served: Served) -> None:
    for what in ("add_engine", "remove_engine"):
        status, answer = asked(served, what, f"{KEY}-user", engine="0")
        assert status == 403 and "admin=1" in answer["error"]["message"]
    for body, reason in (
        ({"engine": "0"}, "is the only one that takes requests"),
        ({"engine": "7"}, "this model's are 0"),
        ({"engine": "0", "grace_seconds": -1}, "must be a number from 0"),
        ({"engine": 0}, "engine"),
    ):
        status, answer = asked(served, "remove_engine", **body)
        assert status == 400 and reason in answer["error"]["message"]


def test_an_engine_without_a_place_is_not_added(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one whose weights the memory does not hold; the server goes on."""

    async def run() -> None:
        async with EngineClient(EngineConfig(str(tiny_model), threads=1)) as client:
            with monkeypatch.context() as patch:
                patch.setattr("kvern.serving.places.shares_of_cores", lambda count: [(1, frozenset())])
                with pytest.raises(ConfigError, match="may use 1 processor cores: each engine needs one"):
                    await client.replicas.add()
            with monkeypatch.context() as patch:
                patch.setattr("kvern.serving.places.shares_of_cores", lambda count: [(1, frozenset())] * count)
                patch.setattr("kvern.serving.places.available_memory", lambda: 10)
                with pytest.raises(ConfigError, match=r"the weights take .* and 0\.0 GB of memory are free"):
                    await client.replicas.add()
            assert len(client.replicas) == 1
            assert len(await tokens_of(client, await begun(client, [5, 6]))) == 100

    asyncio.run(run())


@pytest.mark.nightly
def test_an_added_engine_takes_what_waits_for_another(tiny_model: Path) -> None:
    """As soon as it is ready, which is before it is one of the engines that are counted."""

    async def run() -> None:
        async with EngineClient(EngineConfig(str(tiny_model), threads=1)) as client:
            [first] = client.replicas
            first.supervisor.available.clear()  # as between two engines
            waits = client.replicas.prepare(
                client.inputs.processor.request("r", [5, 6], SamplingParams(max_tokens=9, ignore_eos=True)),
                None,
                news=asyncio.Event(),
                asked=0.0,
            )
            first.workload.take(waits)
            second = await client.replicas.add()
            assert len(await tokens_of(client, waits)) == 9 and second.statistics.requests == 1
            first.supervisor.available.set()
            await client.replicas.remove("1", 0)
            assert len(await tokens_of(client, await begun(client, [5, 6]))) == 100

    asyncio.run(run())


@pytest.mark.sample(1)
@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_full_engine_is_passed_by(tiny_model: Path, dies: bool) -> None:
    """However much of a prompt it has cached. That both die at once ends nothing."""

    async def run() -> None:
        options: dict[str, Any] = {"threads": 1, "max_batch_requests": 2, "data_parallel_size": 2}
        async with EngineClient(EngineConfig(str(tiny_model), **options)) as client:
            hot, first, second = [60] * 400, *(replica.workload for replica in client.replicas)
            alone = await tokens_of(client, await begun(client, hot))
            processes = [child for child in children_of(os.getpid()) if ENGINE in command_of(child)]
            for process in processes:  # none of the four ends before the last begins
                os.kill(process, signal.SIGSTOP)
            generations = [await begun(client, hot) for _ in range(4)]
            assert (first.sequences, second.sequences) == (2, 2)
            for process in processes:
                os.kill(process, signal.SIGKILL if dies else signal.SIGCONT)
            answers = await asyncio.gather(*(tokens_of(client, generation) for generation in generations))
            assert answers == [alone] * 4
            assert (first.tokens, first.sequences, second.tokens, second.sequences) == (0, 0, 0, 0)

    asyncio.run(run())


async def begun(client: EngineClient, prompt: list[int]) -> Generation:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    return await client.replicas.submit(prompt, params, news=asyncio.Event())


async def tokens_of(client: EngineClient, generation: Generation) -> list[int]:
    async for _ in client.replicas.follow([generation], generation.news):
        pass
    return generation.output.outputs[0].token_ids


@pytest.mark.nightly
def test_who_ends_an_engine_does_not_go_to_the_other(
    tiny_model: Path, packages: None, expected: dict[str | None, list[str]]
) -> None:
    with two_engines(tiny_model, "--logits-processors", "end") as served:
        client = served.client()
        with concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
            streams = Streams(served, pool)
            asked = {"logits_processors": {"end": {"how": "exit", "after": 2}}, "ignore_eos": True}
            with pytest.raises(openai.InternalServerError, match="was alone when the engine died"):
                client.completions.create(model="tiny", prompt=[7, 8], max_tokens=LENGTH, extra_body=asked)
            assert streams.texts() == expected[None]
        assert sorted(served.figure("engine_restarts_total", engine=engine) for engine in ENGINES)[0] == 0


@pytest.mark.nightly
def test_an_engine_that_does_not_start_again_leaves_its_streams_to_the_other(
    tiny_model: Path, tmp_path: Path, expected: dict[str | None, list[str]]
) -> None:
    """Also those that are suspected, since it crashed while they ran."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    with two_engines(folder) as served, concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
        streams = Streams(served, pool)
        folder.rename(tmp_path / "away")
        os.kill(engines(served)[0], signal.SIGABRT)
        assert streams.texts() == expected[None]
        assert served.raw("GET", "/ready")[2]["ready"] and served.figure("engine_ready") == 1


def test_each_engine_needs_a_gpu_or_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"data_parallel_size is 999, and this process may use \d+ processor cores"):
        places_of(EngineConfig(device="cpu", data_parallel_size=999))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="data_parallel_size is 2, and this process sees 0 GPUs: each engine needs"):
        places_of(EngineConfig(device="cuda", data_parallel_size=2))
    assert places_of(EngineConfig(device="cuda"))[0].environment == {}


def test_gpus_count_where_pytorch_can_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may tell of some beside a PyTorch that is built for CPUs."""
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    assert gpu_count() == (0 if torch.version.cuda is None else 4)


def test_an_engine_of_several_ranks_gets_as_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.serving.places.gpu_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    places = places_of(EngineConfig(tensor_parallel_size=2, data_parallel_size=2))
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places] == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="each engine needs 2"):
        places_of(EngineConfig(tensor_parallel_size=2, data_parallel_size=3))


@pytest.mark.parametrize(
    ("named", "seen"),
    [(None, ["0", "1", "2", "3"]), ("2, 0", ["2", "0"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"]), ("1,9,2", ["1"]),
     ("", []), ("-1", []), ("0,-1,1", ["0"])],
)  # fmt: skip
def test_gpus_are_those_that_cuda_shows(named: str | None, seen: list[str]) -> None:
    assert visible_gpus(4, named) == seen
    assert visible_gpus(0, named) == []


def spec(tokens: list[int], namespace: bytes = b"") -> RequestSpec:
    return RequestSpec("1", PromptInput(tokens), SamplingParams().resolved({}), 8, namespace=namespace)


def test_the_record_forgets_what_was_used_longest_ago() -> None:
    long = list(range(ENDS[3]))
    names = prefix_names(spec([*long, 1, 2]))
    assert len(names) == 4 and prefix_names(spec(long[:40]), long[40:], names[:1]) == names
    none = PrefixRecord(0)
    none.add(names)
    assert none.cached_tokens(names) == 0 and not none.is_kept
    record = PrefixRecord(ENDS[3])
    record.add(names)
    assert record.cached_tokens(names) == len(long)
    assert record.cached_tokens(prefix_names(spec([*long[:70], 5, *long[71:]]))) == ENDS[1]
    assert record.cached_tokens(prefix_names(spec(long, b"another"))) == 0
    record.add(prefix_names(spec([7] * ENDS[1])))
    assert record.cached_tokens(names) == ENDS[2], "ends go before beginnings"
    ledger = NameLedger()
    record.tell(ledger)
    stored, removed = ledger.take(99)
    assert sorted(stored) == sorted([*names[:3], *prefix_names(spec([7] * ENDS[1]))]) and not removed
    record.add(prefix_names(spec([8] * ENDS[1])))
    stored, removed = ledger.take(99)
    assert sorted(stored) == sorted(prefix_names(spec([8] * ENDS[1]))) and removed == [names[2]]
