"""One server in front of two engines, each with a model of its own: who is asked is who the model's name means."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvern import LLM, EngineConfig, SamplingParams
from kvern.errors import ConfigError
from kvern.server.app import Server
from kvern.server.config import ServerConfig
from kvern.server.keys import KeyRing
from kvern.serving.client import EngineClient
from tests.support.peft_adapters import make_adapter

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT

PROMPT = [5, 9, 17, 33, 2, 81]
OPTIONS: dict[str, Any] = {"threads": 1, "kv_cache_tokens": 2048}
SIZES = {"tiny": 128, "small": 256}
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def expected(model: str, adapters: dict[str, str], **asked: Any) -> str:
    with LLM(model, adapters=adapters, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        return llm.generate(PROMPT, params, **asked)[0].outputs[0].text


@asynccontextmanager
async def two_engines(tiny_model: Path, adapters: dict[str, str], folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a server with `tiny`, also called `other`, and `small`, in an engine process each.

    It may load adapters that are in the folder.
    """
    tiny = EngineConfig(
        str(tiny_model), max_model_len=SIZES["tiny"], served_model_name=("tiny", "other"), adapters=adapters, **OPTIONS
    )
    small = EngineConfig("kvern-1m", max_model_len=SIZES["small"], served_model_name=("small",), **OPTIONS)
    async with EngineClient(tiny) as one, EngineClient(small) as two:
        config = ServerConfig(adapter_folder=folder, api_key=("admin:secret admin=1",))
        server = Server([one, two], config, KeyRing(config))
        transport, key = httpx2.ASGITransport(server.app()), {"authorization": "Bearer secret"}
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=key, timeout=120
        ) as http:
            yield http
        with pytest.raises(ConfigError, match="tiny names two models"):
            Server([one, one], ServerConfig(), KeyRing(ServerConfig()))


async def said(http: httpx2.AsyncClient, model: str | None) -> str:
    answer = (await http.post("/v1/completions", json=BODY | ({} if model is None else {"model": model}))).json()
    assert answer["model"] == (model or "tiny")
    return str(answer["choices"][0]["text"])


@pytest.mark.nightly
def test_each_model_has_an_engine(tiny_model: Path, tmp_path: Path) -> None:
    make_adapter(tiny_model, tmp_path / "adapter", 0, r=4)
    adapters = {"adapter": str(tmp_path / "adapter")}

    async def ask() -> None:
        async with two_engines(tiny_model, adapters, tmp_path) as http:
            texts = await asyncio.gather(*(said(http, name) for name in (None, "tiny", "other", "small", "adapter")))
            plain = expected(str(tiny_model), {})
            assert texts[:3] == [plain] * 3
            assert texts[3] == expected("kvern-1m", {})
            assert texts[4] == expected(str(tiny_model), adapters, adapter="adapter")
            assert len({*texts}) == 3
            await what_is_told_of_both(http)
            await a_name_is_for_one_adapter(http)

    asyncio.run(ask())


async def what_is_told_of_both(http: httpx2.AsyncClient) -> None:
    models = {entry["id"]: entry for entry in (await http.get("/v1/models")).json()["data"]}
    assert {name: entry["max_model_len"] for name, entry in models.items()} == {
        **dict.fromkeys(("tiny", "other", "adapter"), SIZES["tiny"]),
        "small": SIZES["small"],
    }
    assert models["adapter"]["parent"] == "tiny"
    assert (await http.get("/ready")).json() == {"ready": True}
    unknown = await http.post("/v1/completions", json=BODY | {"model": "nothing"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == (
        "there is no model 'nothing': this server has tiny, other, adapter, small"
    )
    tokens = [(await http.post("/tokenize", json={"prompt": "a fox", "model": name})).json() for name in SIZES]
    assert [answer["max_model_len"] for answer in tokens] == list(SIZES.values())
    assert tokens[0]["tokens"] != tokens[1]["tokens"]
    families = list(text_string_to_metric_families((await http.get("/metrics")).text))
    assert len({family.name for family in families}) == len(families)
    [answered] = [family for family in families if family.name == "kvern:request_success"]
    totals = {sample.labels["model_name"]: sample.value for sample in answered.samples if sample.name.endswith("total")}
    assert totals == {"tiny": 4, "small": 1}


async def a_name_is_for_one_adapter(http: httpx2.AsyncClient) -> None:
    async def load(name: str, model: str) -> str:
        body = {"lora_name": name, "lora_path": "adapter", "model": model}
        return (await http.post("/v1/load_lora_adapter", json=body)).text

    for name in ("small", "adapter"):
        assert "is another model's" in await load(name, "tiny" if name == "small" else "small")
    answers = await asyncio.gather(load("late", "tiny"), load("late", "small"))
    assert sum("late is being loaded" in answer for answer in answers) == 1
