"""Engines on a GPU that fall asleep: their memory goes, their answers stay, and several models share a card.

Run with `pytest -m gpu`.
"""

import asyncio
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import EngineConfig, SamplingParams
from kvern.residency.options import served_models
from kvern.runner.device_asleep import DeviceMemoryAsleep
from kvern.serving.client import EngineClient
from tests.support.encoders import make_encoder
from tests.support.families import make_checkpoint
from tests.support.peft_adapters import make_adapter
from tests.support.several_models import said, server_of, states
from tests.support.sleeping import MIB, Owner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_model_len": 256,
    "kv_cache_tokens": 1 << 17,
    "max_batch_requests": 8,
    "enable_sleep": True,
    "deterministic": True,  # an answer that is interrupted goes on from a prefill
}
EXACT = {"deterministic": False, "dtype": "float32"}
"""Of models whose bits depend on the batch."""
PARAMS = SamplingParams(max_tokens=160, seed=5, ignore_eos=True)
PROMPT = [5, 9, 17, 33, 2, 60]
CARD = torch.device("cuda:0")
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


@pytest.mark.alone
def test_memory_goes_and_comes_back_with_its_contents_at_its_addresses() -> None:
    owner = Owner(CARD)
    memory = DeviceMemoryAsleep(owner, CARD, [owner.cache])
    addresses = [tensor.data_ptr() for tensor in owner.tensors]
    for turn in range(3):
        owner.change(turn)
        expected, total = [tensor.clone() for tensor in owner.kept], owner.call()
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        held = memory.leave()
        assert torch.cuda.mem_get_info()[0] >= free + (40 + 6 + 5 + 128) * MIB
        assert held < torch.cuda.get_device_properties(0).total_memory // 4
        memory.enter()
        assert [tensor.data_ptr() for tensor in owner.tensors] == addresses
        assert not owner.cache.any()
        for tensor, wanted in zip(owner.kept, expected, strict=True):
            assert torch.equal(tensor, wanted)
        assert owner.call() == total
        assert owner.parts["half"].data_ptr() == owner.parts["whole"].data_ptr() + 20 * MIB
    free = torch.cuda.mem_get_info()[0]
    del owner, memory, tensor, wanted, expected
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free + 150 * MIB, "nothing is kept when nobody uses it"


@pytest.mark.alone
def test_memory_that_another_process_took_is_missed_and_nothing_is_half_there() -> None:
    owner = Owner(CARD)
    memory = DeviceMemoryAsleep(owner, CARD, [owner.cache])
    expected = owner.parts["whole"].clone()
    memory.leave()
    code = (
        "import torch; free = torch.cuda.mem_get_info()[0]\n"
        "held = torch.empty(free - (600 << 20), dtype=torch.uint8, device='cuda')\n"
        "more = [torch.empty(20 << 20, dtype=torch.uint8, device='cuda') for _ in range(26)]\n"
        "torch.cuda.synchronize(); print('holding', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        try:
            with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate"):
                memory.enter()
        finally:
            process.stdin.write("\n")
            process.stdin.flush()
            process.wait()
    memory.enter()
    assert torch.equal(owner.parts["whole"], expected)


async def answer(client: EngineClient, adapter: str | None = None, sleep_after: int | None = None) -> list[int]:
    """The tokens of an answer, in the middle of which the engine may sleep and wake."""
    news = asyncio.Event()
    generation = await client.replicas.submit(PROMPT, PARAMS, news=news, adapter=adapter)
    async for _ in client.replicas.follow([generation], news):
        if sleep_after is not None and len(generation.output.outputs[0].token_ids) >= sleep_after:
            sleep_after = None
            assert await client.sleep() and not generation.output.finished
            await client.start()
    return generation.output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("llama", {}, id="dense"),
        pytest.param("qwen3_5", EXACT, id="states"),
        pytest.param("deepseek_v3", EXACT, id="latents and experts"),
        pytest.param("llama", {"kv_cache_dtype": "fp8", "kv_tier": ("host:64MB",)}, id="8 bits and a tier"),
        pytest.param("llama", {"quantization": "int4"}, id="int4"),
        pytest.param("llama", {"proposer": "ngram"}, id="drafts"),
        pytest.param("llama", {"tensor_parallel_size": 2}, id="ranks", marks=TWO),
        pytest.param("llama", {"pipeline_parallel_size": 2}, id="stages", marks=TWO),
    ],
)
def test_answers_are_those_of_an_engine_that_never_slept(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256} if options.get("quantization") else {}
    folder = make_checkpoint(family, tmp_path, **sizes)

    async def run() -> None:
        config = EngineConfig(str(folder), gpu_memory_share=0.08, **OPTIONS | options)
        async with EngineClient(config) as client:
            assert client.sleeps
            expected = await answer(client)
            link = next(iter(client.replicas)).supervisor.link
            for after in (None, 60, 1):
                assert await client.sleep()
                assert 0 < link.gpu_bytes < 4 << 30
                await client.start()
                assert await answer(client, sleep_after=after) == expected
                assert next(iter(client.replicas)).supervisor.link is link, "the same process goes on"

    asyncio.run(run())


def test_adapters_come_and_go_while_their_model_is_asleep(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model")
    folders = [str(make_adapter(model, tmp_path / name, seed)) for seed, name in enumerate(("one", "two"))]

    async def run() -> None:
        adapters = {"max_adapters": 2, "adapters": {"one": folders[0]}}
        config = EngineConfig(str(model), gpu_memory_share=0.08, **OPTIONS, **adapters)
        async with EngineClient(config) as client:
            await client.adapters.load("two", folders[1])
            plain, one, two = [await answer(client, name) for name in (None, "one", "two")]
            assert await client.sleep()
            client.adapters.unload("two")
            await client.start()
            assert [await answer(client, name) for name in (None, "one")] == [plain, one]
            await client.adapters.load("three", folders[1])
            assert await answer(client, "three", sleep_after=5) == two

    asyncio.run(run())


def test_models_share_a_card_and_make_way_for_each_other(tmp_path: Path) -> None:
    """Two models and an encoder, of which two fit."""
    for number, family in enumerate(("llama", "qwen3_5")):
        make_checkpoint(family, tmp_path / f"model-{number}")
    make_encoder("bert", tmp_path / "encoder")
    options = {"max_model_len": 256, "max_batch_requests": 8, "kv_cache_tokens": 4096, "gpu_memory_share": 0.05}
    models = {f"model-{number}": str(tmp_path / f"model-{number}") for number in range(2)}
    texts = {"encoder": {"model": str(tmp_path / "encoder"), "max_model_len": 64}}
    found = served_models(EngineConfig(device="cuda", deterministic=False, **options), models | texts, None)
    card = found[0].gpu
    assert card is not None and all(one.engine.enable_sleep for one in found)

    async def run() -> None:
        async with server_of(found, memory=int(0.13 * card.total)) as (http, keeper):
            assert keeper.residency.memory == int(0.13 * card.total)
            expected = {}
            for _ in range(3):
                for name in models:
                    expected.setdefault(name, await said(http, name))
                    assert await said(http, name) == expected[name]
                body = {"model": "encoder", "input": [[5, 9, 17]]}
                answered = (await http.post("/v1/embeddings", json=body)).json()
                vector = answered["data"][0]["embedding"]
                assert expected.setdefault("encoder", vector) == vector
                assert "cold" not in (await states(http)).values()

    asyncio.run(run())
