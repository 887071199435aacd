"""Models that are asleep: their engines stay, their memory goes, and answers are those of engines that never slept."""

import asyncio
import os
import random
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import EngineConfig, SamplingParams
from kvern.errors import ConfigError
from kvern.residency.keeper import Keeper, memory_of
from kvern.serving.client import EngineClient
from kvern.serving.link import EngineLink
from kvern.serving.replica import Replica
from tests.support.encoders import make_encoder
from tests.support.families import make_checkpoint
from tests.support.peft_adapters import make_adapter
from tests.support.rank_features import DIVISIONS, models_of
from tests.support.served import children_of
from tests.support.several_models import OPTIONS, said, served, server_of, states

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT

PARAMS = SamplingParams(max_tokens=160, seed=5, ignore_eos=True)
PROMPT = [5, 9, 17, 33, 2, 81]
BLOCK = 1 << 20


async def answer(client: EngineClient, adapter: str | None = None, sleep_after: int | None = None) -> list[int]:
    """The tokens of an answer, in the middle of which the engine may sleep and wake."""
    news = asyncio.Event()
    generation = await client.replicas.submit(PROMPT, PARAMS, news=news, adapter=adapter)
    async for _ in client.replicas.follow([generation], news):
        if sleep_after is not None and len(generation.output.outputs[0].token_ids) >= sleep_after:
            sleep_after = None
            assert await client.sleep() == client.sleeps and not generation.output.finished
            await client.start()
    return generation.output.outputs[0].token_ids


def engine_pids(client: EngineClient) -> list[int]:
    child: Any = next(iter(client.replicas)).supervisor.link.process
    return [child._process.pid, *children_of(child._process.pid)]


def own_memory(client: EngineClient) -> int:
    """Bytes of an engine's memory that are in no file: what is shared counts for more when others end meanwhile."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in engine_pids(client)]
    return sum(1024 * int(text.partition("Anonymous:")[2].split()[0]) for text in texts)


def counts_once(replica: Replica) -> bool:
    """Its metrics have what its engines say that they generated, one after another."""
    [counted] = [
        sample.value
        for family in replica.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "kvern:generation_tokens_total"
    ]
    return counted == replica.statistics.generation_tokens


def link_of(client: EngineClient) -> EngineLink:
    return next(iter(client.replicas)).supervisor.link


@pytest.mark.nightly
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("kvern-1m", {}, id="dense"),
        pytest.param("qwen3_next", {}, id="states"),
        pytest.param("kvern-1m", {"kv_tier": ("host:64MB",)}, id="tier", marks=pytest.mark.nightly),
        pytest.param("kvern-1m", {"quantization": "int8"}, id="int8", marks=pytest.mark.nightly),
    ],
)
def test_answers_are_those_of_an_engine_that_never_slept_and_its_memory_goes(
    model: str, options: dict[str, Any], tmp_path: Path
) -> None:
    options = OPTIONS | options
    if model == "qwen3_next":
        model = str(make_checkpoint(model, tmp_path, num_experts=0, vocab_size=512))

    async def run() -> None:
        async with EngineClient(EngineConfig(model, **options)) as client:
            expected = await answer(client)
            link, held = link_of(client), own_memory(client)
            for after in (None, 5, 1):
                assert await client.sleep()
                assert own_memory(client) < held - BLOCK
                await client.start()
                assert await answer(client, sleep_after=after) == expected
                assert link_of(client) is link, "the same process goes on"
            assert all(map(counts_once, client.replicas))
            assert any(replica.statistics.generation_tokens for replica in client.replicas)

    asyncio.run(run())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "division", [pytest.param(name, marks=pytest.mark.features("sleep", name)) for name in DIVISIONS]
)
def test_divided_models_sleep(division: str, tmp_path: Path) -> None:
    model = "kvern-1m"
    for family, sizes in models_of("sleep", division).items():
        model = str(make_checkpoint(family, tmp_path, vocab_size=512, **sizes))

    async def run() -> None:
        async with EngineClient(EngineConfig(model, **OPTIONS | DIVISIONS[division])) as client:
            assert client.sleeps == ("enable_dp_attention" not in DIVISIONS[division])
            expected = await answer(client)
            for after in (None, 5, 1):
                assert await client.sleep() == client.sleeps, "it slept, or has ended"
                await client.start()
                assert await answer(client, sleep_after=after) == expected
            assert all(map(counts_once, client.replicas))
            assert any(replica.statistics.generation_tokens for replica in client.replicas)

    asyncio.run(run())


@pytest.mark.nightly
def test_adapters_come_and_go_while_their_model_is_asleep(tiny_model: Path, tmp_path: Path) -> None:
    folders = [str(make_adapter(tiny_model, tmp_path / name, seed)) for seed, name in enumerate(("one", "two"))]

    async def run() -> None:
        config = EngineConfig(str(tiny_model), **OPTIONS, max_adapters=2, adapters={"one": folders[0]})
        async with EngineClient(config) as client:
            await client.adapters.load("two", folders[1])
            plain, one, two = [await answer(client, name) for name in (None, "one", "two")]
            assert len({tuple(tokens) for tokens in (plain, one, two)}) == 3
            assert await client.sleep()
            client.adapters.unload("two")
            await client.start()
            [engine] = (replica.adapters for replica in client.replicas)
            assert len(engine.known) == 2, "the engine was told of it"
            assert [await answer(client, name) for name in (None, "one")] == [plain, one]
            await client.adapters.load("three", folders[1])
            assert await answer(client, "three", sleep_after=5) == two

    asyncio.run(run())


@pytest.mark.nightly
def test_weights_that_were_replaced_are_those_after_a_sleep(tiny_model: Path, tmp_path: Path) -> None:
    new = shutil.copytree(tiny_model, tmp_path / "new")
    weights = load_file(new / "model.safetensors")
    save_file({name: weight + 0.1 * torch.randn_like(weight) for name, weight in weights.items()}, new / "new")
    (new / "new").replace(new / "model.safetensors")

    async def run() -> None:
        async with EngineClient(EngineConfig(str(tiny_model), **OPTIONS)) as client:
            first = await answer(client)
            assert await answer(client, sleep_after=5) == first
            version = await client.replicas.weights.update(str(new), keep=False)
            expected = await answer(client)
            assert expected != first
            assert await answer(client, sleep_after=5) == expected
            assert await client.sleep()
            os.kill(engine_pids(client)[0], signal.SIGKILL)
            await client.start()
            assert await answer(client) == expected
            assert next(iter(client.replicas)).weights.version == version

    asyncio.run(run())


def test_a_trace_that_waits_for_steps_keeps_no_engine_awake() -> None:
    async def run() -> None:
        async with EngineClient(EngineConfig("kvern-1m", **OPTIONS)) as client:
            [replica] = client.replicas
            taking = asyncio.create_task(replica.traces.take(5, 100.0))
            await asyncio.sleep(0)
            assert await client.sleep()
            with pytest.raises(ConfigError, match="falls asleep"):
                await taking
            await client.start()
            await answer(client)

    asyncio.run(run())


def test_an_engine_that_cannot_sleep_ends_and_the_reason_is_told_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with EngineClient(EngineConfig("kvern-1m", **OPTIONS)) as client:
            expected, link = await answer(client), link_of(client)
            link.ready = msgspec.structs.replace(link.ready, sleeps=False)  # as with DP attention
            assert not client.sleeps and not await client.sleep()
            assert "as it cannot sleep: engines with DP attention do not sleep" in caplog.text
            assert not any(record.exc_info for record in caplog.records)
            await client.start()
            assert client.sleeps and await answer(client) == expected

    asyncio.run(run())


@pytest.mark.nightly
def test_an_engine_that_ends_in_its_sleep_or_at_its_end_is_replaced() -> None:
    async def run() -> None:
        async with EngineClient(EngineConfig("kvern-1m", **OPTIONS)) as client:
            lost = asyncio.Event()
            client.replicas.lost = lost.set
            expected = await answer(client)
            assert await client.sleep()
            os.kill(engine_pids(client)[0], signal.SIGKILL)
            await asyncio.wait_for(lost.wait(), 30)
            await client.start()
            assert await answer(client) == expected
            assert await client.sleep()
            lost.clear()
            [pid, *_] = engine_pids(client)
            os.kill(pid, signal.SIGSTOP)  # it cannot wake before it is killed
            waking = asyncio.create_task(client.start())
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            await waking
            assert lost.is_set() and await answer(client) == expected
            os.kill(engine_pids(client)[0], signal.SIGSTOP)
            falling = asyncio.create_task(client.sleep())
            await asyncio.sleep(0)
            os.kill(engine_pids(client)[0], signal.SIGKILL)
            assert not await falling
            await client.start()
            assert await answer(client) == expected
            assert all(map(counts_once, client.replicas))
            assert any(replica.statistics.generation_tokens for replica in client.replicas)

    asyncio.run(run())


def test_models_sleep_and_wake_for_each_other_and_one_that_is_killed_is_cold() -> None:
    async def run() -> None:
        names = ["one", "two"]
        async with server_of([served(name, "kvern-1m", kv_cache_tokens=8192) for name in names]) as (http, keeper):
            expected = [await said(http, name) for name in names]
            links = await until_settled(http, keeper)
            keeper.residency.memory = keeper.residency.held - 10 * BLOCK  # not enough for both
            keeper.keep(keeper.residents[0], None)  # it decides anew
            while "asleep" not in (found := await states(http)).values():
                await asyncio.sleep(0.01)
            order = sorted(names, key=lambda name: found[name] == "awake")
            for _ in range(3):
                for name, other in (order, order[::-1]):
                    assert await said(http, name) == expected[names.index(name)]
                    await until_settled(http, keeper)
                    assert await states(http) == {name: "awake", other: "asleep"}
            assert await until_settled(http, keeper) == links, "no process was started"
            figures = (await http.get("/metrics")).text
            assert f'kvern:model_state{{model_name="{order[0]}"}} 1.0' in figures
            one = keeper.find(order[0])
            assert one is not None and one.client is not None
            assert keeper.residency.held <= keeper.residency.memory
            os.kill(engine_pids(one.client)[0], signal.SIGKILL)
            while (await states(http))[order[0]] != "cold":
                await asyncio.sleep(0.01)
            assert await said(http, order[0]) == expected[names.index(order[0])]

    asyncio.run(run())


async def until_settled(http: httpx2.AsyncClient, keeper: Keeper) -> list[EngineLink]:
    """The links of all engines, once no model moves."""
    while any(keeper.residency.moving(name) for name in await states(http)):
        await asyncio.sleep(0.01)
    return [link_of(one.client) for one in keeper.residents if one.client is not None]


@pytest.mark.nightly
def test_models_that_are_switched_at_random_answer_alike_and_take_level_memory(
    tiny_model: Path, tmp_path: Path
) -> None:
    """40 random orders and requests, some of them at the same time; none is aborted."""
    encoder = make_encoder("bert", tmp_path / "encoder")
    adapter = make_adapter(tiny_model, tmp_path / "adapter", 0)
    dice = random.Random(0)

    async def run() -> None:
        models = [
            served("dense", "kvern-1m"),
            served("tiny", tiny_model, adapters={"fox": str(adapter)}),
            served("embedder", encoder, kv_cache_tokens=None, max_model_len=32),
        ]
        async with server_of(models) as (http, keeper):

            async def ask(name: str) -> object:
                if name != "embedder":
                    return await said(http, name)
                return (await http.post("/v1/embeddings", json={"model": name, "input": "red fox"})).json()["data"]

            names = ["dense", "tiny", "fox", "embedder"]
            expected = {name: await ask(name) for name in names}
            sizes: list[int] = []
            for turn in range(40):
                asked = dice.sample(names, 2)
                order = f"/v1/models/{dice.choice(names)}/{dice.choice(['sleep'] * 5 + ['unload'])}"
                ordered = asyncio.create_task(http.post(order))
                assert await asyncio.gather(*map(ask, asked)) == [expected[name] for name in asked]
                assert (await ordered).status_code == 200
                if turn in (19, 39):
                    await asyncio.gather(*map(ask, names))
                    clients = [one.client for one in keeper.residents if one.client is not None]
                    sizes.append(sum(memory_of(client, asleep=True) for client in clients))
            assert sizes[1] < 1.1 * sizes[0], sizes

    asyncio.run(run())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "without"),
    [
        (1, 0),
        pytest.param(2, 0, marks=pytest.mark.nightly),
        pytest.param(2, 1, marks=pytest.mark.nightly),
    ],
)
def test_an_engine_without_a_place_for_its_memory_ends_instead(ranks: int, without: int) -> None:
    """With all its ranks, of which one is `without` a place."""

    async def run() -> None:
        async with EngineClient(EngineConfig("kvern-1m", **OPTIONS, tensor_parallel_size=ranks)) as client:
            expected = await answer(client)
            pids = engine_pids(client)
            assert len(pids) == ranks
            resource.prlimit(pids[without], resource.RLIMIT_FSIZE, (4096, 4096))
            assert not await client.sleep()
            assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
            await client.start()
            assert await answer(client) == expected

    asyncio.run(run())
