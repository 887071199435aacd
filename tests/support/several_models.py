"""Several models in one server that runs in this process."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from kvern import EngineConfig
from kvern.residency.keeper import Keeper
from kvern.residency.options import ServedModel
from kvern.residency.policy import Terms
from kvern.residency.pressure import Watch
from kvern.server.app import Server
from kvern.server.config import ServerConfig
from kvern.server.keys import KeyRing
from kvern.serving.replica import Replica
from tests.support.served import PATIENCE

OPTIONS: dict[str, Any] = {"threads": 1, "kv_cache_tokens": 2048, "dtype": "float32", "device": "cpu"}
BODY = {"prompt": [5, 9, 17, 33, 2, 81], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
MUCH = 1 << 36
PLAIN = Terms()
PROMPTS = [[7 + number, *range(20, 100)] for number in range(10)]


def served(name: str, model: Path | str, *aliases: str, terms: Terms = PLAIN, **options: Any) -> ServedModel:
    return ServedModel(
        EngineConfig(str(model), served_model_name=(name, *aliases), **{**OPTIONS, **options}),
        terms,
    )


@asynccontextmanager
async def server_of(
    models: Sequence[ServedModel], memory: int = MUCH, watch: Watch | None = None, **options: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, Keeper]]:
    async with Keeper(models, memory, None, watch) as keeper:
        config = ServerConfig(api_key=("admin:secret admin=1", "user:word", "nothing:none concurrent=0"), **options)
        app = Server([], config, KeyRing(config), keeper=keeper).app()
        headers = {"authorization": "Bearer secret"}
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1", headers=headers, timeout=PATIENCE
        ) as http:
            yield http, keeper


async def said(http: httpx2.AsyncClient, model: str, **body: Any) -> str:
    answer = (await http.post("/v1/completions", json=BODY | {"model": model, **body})).json()
    assert answer.get("model") == model, answer
    return str(answer["choices"][0]["text"])


async def states(http: httpx2.AsyncClient) -> dict[str, str]:
    return {entry["id"]: entry["state"] for entry in (await http.get("/v1/models")).json()["data"]}


async def load(http: httpx2.AsyncClient, model: str) -> list[list[int]]:
    """The answers to all prompts at once."""

    async def ask(prompt: list[int]) -> list[int]:
        body = {"model": model, "prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        answer = (await http.post("/v1/completions", json=body | {"return_token_ids": True})).json()
        assert answer["choices"][0]["finish_reason"] == "length", answer
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    return await asyncio.gather(*map(ask, PROMPTS))


def engine_of(keeper: Keeper, name: str) -> Replica:
    resident = keeper.find(name)
    assert resident is not None and resident.client is not None
    return next(iter(resident.client.replicas))
