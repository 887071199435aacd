"""Several models in one server, woken by requests, put to sleep for each other; failures reach their own requests."""

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvern import EngineConfig, SamplingParams
from kvern.residency.options import ServedModel
from kvern.residency.policy import Terms
from kvern.server.service import Ask, Running, Service
from kvern.serving.child import EngineProcess
from kvern.serving.client import EngineClient
from kvern.serving.link import EngineLink
from kvern.serving.replicas import Replicas
from kvern.serving.workload import Generation
from tests.support.encoders import make_encoder
from tests.support.peft_adapters import make_adapter
from tests.support.several_models import BODY, OPTIONS, PLAIN, said, served, server_of, states

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT


@pytest.mark.nightly
def test_two_models_take_turns_and_answer_as_if_they_had_never_slept(tiny_model: Path) -> None:
    """There is memory for one: the second request of the first model wakes it again."""

    async def run() -> None:
        models = [served("one", "kvern-1m", "alias"), served("two", tiny_model)]
        memory = max(model.estimate().awake for model in models) + 1
        async with server_of(models, memory) as (http, keeper):
            assert await states(http) == {"one": "cold", "alias": "cold", "two": "cold"}
            first = await said(http, "alias")
            assert await states(http) == {"one": "awake", "alias": "awake", "two": "cold"}
            other = await said(http, "two")
            assert await states(http) == {"one": "cold", "alias": "cold", "two": "awake"}
            keeper.residency.memory = memory = int(1.5 * keeper.residency.footprint("two").awake)  # that was estimated
            assert [await said(http, "one"), await said(http, "two")] == [first, other]
            assert (await http.get("/ready")).json()["ready"]
            figures = (await http.get("/metrics")).text
            for name in ("one", "two"):
                assert f'kvern:key_generation_tokens_total{{key="admin",model_name="{name}"}} 24.0' in figures
                assert f'kvern:model_wakes_total{{model_name="{name}"}} 2.0' in figures
                assert f'kvern:engine_restarts_total{{model_name="{name}"}} 0.0' in figures
                assert f'kvern:request_success_total{{finished_reason="length",model_name="{name}"}} 2.0' in figures
            assert 'kvern:engine_ready{model_name="one"} NaN' in figures
            assert keeper.residency.held <= memory
            late = await http.post("/v1/completions", json=BODY | {"model": "one", "timeout": 1e-6})
            assert late.status_code == 408 and "before one was awake" in late.text

    asyncio.run(run())


@pytest.mark.nightly
def test_a_model_that_cannot_be_woken_fails_its_own_requests_alone(tiny_model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    [weights] = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])

    async def run() -> None:
        async with server_of([served("good", "kvern-1m"), served("broken", broken)]) as (http, _):
            expected = await said(http, "good")
            fifty = [http.post("/v1/completions", json=BODY | {"model": "broken"}) for _ in range(50)]
            answers = asyncio.gather(*fifty)
            assert [await said(http, "good") for _ in range(5)] == [expected] * 5
            for answer in await answers:
                assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
                message = answer.json()["error"]["message"]
                assert message.startswith("model broken cannot be woken: ") and "safetensors" in message
            again = await http.post("/v1/completions", json=BODY | {"model": "broken"})
            assert again.status_code == 503, "it is not tried again at once"
            assert await states(http) == {"good": "awake", "broken": "cold"}
            assert await said(http, "good") == expected

    asyncio.run(run())


def test_administrators_wake_models_and_put_them_to_sleep(tiny_model: Path, tmp_path: Path) -> None:
    async def run() -> None:
        models = [served("chat", "kvern-1m", terms=Terms(pin=True)), served("tiny", tiny_model)]
        async with server_of(models, adapter_folder=tmp_path) as (http, _):
            taken = {"model": "chat", "lora_name": "tiny", "lora_path": "some"}
            refused = await http.post("/v1/load_lora_adapter", json=taken)
            assert refused.status_code == 400 and "tiny is another model's" in refused.text
            assert await states(http) == {"chat": "awake", "tiny": "cold"}
            assert (await http.post("/v1/models/tiny/load")).json()["state"] == "awake"
            for order, state in (("sleep", "asleep"), ("load", "awake"), ("sleep", "asleep"), ("unload", "cold")):
                assert (await http.post(f"/v1/models/tiny/{order}")).json()["state"] == state
            assert (await http.post("/v1/models/tiny/sleep")).json()["state"] == "cold"
            refused = await http.post("/v1/models/chat/sleep")
            assert refused.status_code == 409 and "chat is pinned" in refused.text
            assert (await http.post("/v1/models/nothing/load")).status_code == 404
            assert (await http.post("/v1/models/chat/load", headers={"authorization": "Bearer x"})).status_code == 401

    asyncio.run(run())


def test_ollamas_keep_alive_counts_from_the_end_of_its_request_and_for_one_stay() -> None:
    async def run() -> None:
        async with server_of([served("chat", "kvern-1m", terms=Terms(keep_alive=600.0))]) as (http, keeper):
            [chat] = keeper.residents

            async def ask(keep_alive: object, key: str = "secret", stream: bool = False) -> float | None:
                body = {"model": "chat", "prompt": "a fox", "raw": True, "options": {"num_predict": 2}}
                body |= {"keep_alive": keep_alive, "stream": stream}
                headers = {"authorization": f"Bearer {key}"}
                assert (await http.post("/api/generate", json=body, headers=headers)).status_code == 200
                assert (await http.get("/api/ps")).status_code == 200
                expires = keeper.residency.expires_at("chat")
                return None if expires is None else round(expires - time.monotonic(), -1)

            assert [await ask("5m"), await ask(-1), await ask("5m", "word"), await ask(-1, "word")] == [
                300,
                None,
                300,
                600,
            ], "a user's key does not outlast the server's term"
            assert (await http.post("/api/generate", json={"model": "chat", "keep_alive": "x"})).status_code == 400
            assert await ask("999999999d", stream=True) is None

            def wakes() -> float | None:
                return chat.figures.registry.get_sample_value("kvern:model_wakes_total", {"model_name": "chat"})

            await ask(0)
            assert (await keeper.dismiss(chat, "asleep", 10.0), wakes()) == ("asleep", 1)

    asyncio.run(run())


@pytest.mark.nightly
def test_a_generative_model_an_embedder_and_an_adapter_side_by_side(tiny_model: Path, tmp_path: Path) -> None:
    encoder = make_encoder("bert", tmp_path / "encoder")
    make_adapter(tiny_model, tmp_path / "adapter", 0, r=4)
    plain = EngineConfig(
        str(encoder), served_model_name=("embedder",), threads=1, dtype="float32", device="cpu", max_model_len=32
    )
    tiny = served("tiny", tiny_model, adapters={"fox": str(tmp_path / "adapter")})

    async def run() -> None:
        async with server_of([served("chat", "kvern-1m"), ServedModel(plain), tiny]) as (http, _):
            texts = await asyncio.gather(*(said(http, name) for name in ("chat", "tiny", "fox")))
            assert len(set(texts)) == 3
            wanted = {"model": "embedder", "input": "red foxes"}
            told = (await http.post("/v1/embeddings", json=wanted)).json()["data"]
            pairs = {"model": "embedder", "query": "red", "documents": ["foxes", "red"]}
            assert len((await http.post("/v1/rerank", json=pairs)).json()["results"]) == 2
            for name in ("embedder", "tiny"):
                assert (await http.post(f"/v1/models/{name}/unload")).json()["state"] == "cold"
            assert (await http.post("/v1/embeddings", json=wanted)).json()["data"] == told
            assert await said(http, "fox") == texts[2], "its adapter is read again"
            assert (await http.post("/v1/embeddings", json=wanted | {"model": "chat"})).status_code == 400

    asyncio.run(run())


@pytest.mark.nightly
def test_what_an_engine_has_begun_goes_on_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are preempted: they get the tokens that they would have got, from an engine that may not be smaller."""
    started: list[EngineConfig] = []
    start = EngineLink.start

    async def noted(config: EngineConfig, process: EngineProcess, arena: str | None = None) -> EngineLink:
        started.append(config)
        return await start(config, process, arena)

    monkeypatch.setattr(EngineLink, "start", noted)
    params = SamplingParams(max_tokens=60, seed=5, ignore_eos=True)

    async def run() -> None:
        async with EngineClient(EngineConfig("kvern-1m", **OPTIONS)) as client:

            async def tokens(rest: bool) -> list[int]:
                news = asyncio.Event()
                generation = await client.replicas.submit("A fox", params, news=news)
                async for _ in client.replicas.follow([generation], news):
                    if rest and len(generation.output.outputs[0].token_ids) >= 5:
                        rest = False
                        await client.rest()
                        assert not generation.output.finished and client.replicas.trouble is None
                        await client.start()
                return generation.output.outputs[0].token_ids

            expected = await tokens(rest=False)
            assert await tokens(rest=True) == expected
            assert await tokens(rest=False) == expected
            first, later = started
            ready = client.replicas.ready
            assert first.max_model_len is None and later.max_model_len == ready.max_model_len
            assert later.max_batch_requests == ready.max_batch_requests

    asyncio.run(run())


def test_limits_and_timeouts_hold_before_a_model_is_woken() -> None:
    async def run() -> None:
        async with server_of([served("chat", "kvern-1m")], max_queue=1) as (http, keeper):
            [chat] = keeper.residents
            keeper.residency.memory = keeper.residency.footprint("chat").awake
            keeper.residency.add("other", PLAIN, keeper.residency.footprint("chat"), 0.0)
            keeper.residency.asked("other", 0.0)
            keeper.residency.decide(0.0)  # it wakes, so that chat waits for its memory

            async def ask(key: str, **fields: Any) -> tuple[int, str]:
                headers = {"authorization": f"Bearer {key}"}
                answer = await http.post("/v1/completions", json=BODY | fields, headers=headers)
                return answer.status_code, answer.json()["error"]["message"]

            assert (await ask("none"))[0] == 403, "a key that may ask nothing wakes nothing"
            assert (await ask("word", timeout=-1))[0] == 400
            assert keeper.residency.visits("chat", 0.0) == 0.0
            status, said = await ask("word", timeout=0.01)
            assert status == 408 and "before chat was awake" in said
            first = asyncio.create_task(ask("word", timeout=1.0))
            while not chat.waiting:
                await asyncio.sleep(0)
            status, said = await ask("secret")
            assert status == 429 and "1 requests wait for chat already" in said
            first.cancel()

    asyncio.run(run())


@pytest.mark.nightly
def test_the_time_of_a_models_first_wake_is_a_part_of_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[float] = []
    deadlines: list[tuple[float, float]] = []
    start, follow = Service.start, Replicas.follow

    async def started(service: Service, ask: Ask, patient: bool = False) -> Running:
        began.append(asyncio.get_running_loop().time())
        return await start(service, ask, patient)

    def followed(
        replicas: Replicas, some: Sequence[Generation], news: asyncio.Event, deadline: float | None = None
    ) -> Any:
        assert deadline is not None
        deadlines.append((deadline, asyncio.get_running_loop().time()))
        return follow(replicas, some, news, deadline)

    monkeypatch.setattr(Service, "start", started)
    monkeypatch.setattr(Replicas, "follow", followed)
    fields = {"raw": True, "stream": False, "options": {"num_predict": 2}, "timeout": 600}

    async def run() -> None:
        async with server_of([served(name, "kvern-1m") for name in ("one", "two")]) as (http, keeper):
            asked = BODY | {"model": "one", "timeout": 600}
            for path, body in (
                ("/v1/completions", asked),
                ("/v1/completions", asked),
                ("/api/generate", {"model": "two", "prompt": "a fox", **fields}),
            ):
                answer = await http.post(path, json=body)
                assert answer.status_code == 200, answer.text
            woken = [
                one.figures.registry.get_sample_value("kvern:model_wake_seconds_total", {"model_name": one.name})
                for one in keeper.residents
            ]
            for seconds, (deadline, now) in zip(woken, deadlines[::2], strict=True):
                assert seconds is not None and now < deadline <= now + 600 - seconds
            assert deadlines[1][0] >= began[1] + 600, "it was awake"

    asyncio.run(run())


def test_models_whose_files_are_gone_are_not_listed_as_ollamas(tiny_model: Path, tmp_path: Path) -> None:
    lost = shutil.copytree(tiny_model, tmp_path / "lost")

    async def run() -> None:
        async with server_of([served("lost", lost), served("tiny", tiny_model)]) as (http, _):
            shutil.rmtree(lost)
            listed = await http.get("/api/tags")
            assert [entry["name"] for entry in listed.json()["models"]] == ["tiny:latest"]

    asyncio.run(run())


@pytest.mark.nightly
def test_a_pinned_model_that_cannot_be_woken_ends_the_start(tiny_model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    (broken / "config.json").write_text("{}")

    async def run() -> None:
        async with server_of([served("broken", broken, terms=Terms(pin=True))]):
            raise AssertionError("it must not serve")

    with pytest.raises(Exception, match="model broken cannot be woken"):
        asyncio.run(run())
