"""Many prompts, greedy and sampled: tokens with drafts of anybody are those without.

Five hundred for the embedded model, fewer for tiny ones: with windows, with states, and with a layer that drafts.
In `make test` a few answer very few; the rest is nightly.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from kvern.models.hub import resolve_model
from kvern.request.request import Request
from tests.support.draft_heads import add_prediction, write_eagle, write_medusa
from tests.support.draft_server import Body, drafts_served
from tests.support.families import make_checkpoint
from tests.support.head_drafting import MEDUSA_FILE
from tests.support.internals import core_of, engine_of, proposer_of, vocab_size_of
from tests.support.remote_drafts import wait_for_answers
from tests.support.served import serving
from tests.support.speculation import AnyLength
from tests.support.tiny_model import make_tiny_model

ALL, SOME, FEW = 500, 60, 8
"""Prompts of the embedded model, of tiny ones, and of those that are not nightly."""
LENGTH = 20
EMBEDDED = "kvern-12m"
TINY = ["llama", "gemma3", "qwen3_next"]
TOKENS = list(range(60, 68))
"""Those that tiny models may say, so that their texts repeat and heads of random weights are right at times."""
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 128,
    "max_batch_requests": 24,
    "max_batch_tokens": 96,
    "block_size": 8,
}
ROOM = {"kv_cache_tokens": 128, "block_size": 4}
"""For a few requests at a time."""
VARIANTS: dict[str, dict[str, Any]] = {
    "room": {},
    "not cached": {"prefix_cache": False},
    "whole prompts": {"chunked_prefill": False, "max_batch_tokens": 128},
    "little room": ROOM,
    "little room, not cached": ROOM | {"prefix_cache": False},
}
HEROES = ["a gull", "an old keeper", "two sisters", "a robot", "the baker", "a whale", "my cat", "a sailor", "ice", "I"]
PLACES = ["at sea", "in a tower", "on the hill", "by fire", "in the rain", "at night", "at home", "afar", "up", "alone"]
WISHES = ("Tell me of", "Write a poem about", "Repeat twice:", "List three facts of", "Why is there")


class Asked(NamedTuple):
    prompt: list[int]
    params: SamplingParams


class Target(NamedTuple):
    """A model, what it is asked, and the tokens without drafts."""

    model: str
    asked: list[Asked]
    expected: list[list[int]]


def answers(llm: LLM, asked: Sequence[Asked], leaving: int = 0) -> list[list[int]]:
    """Of each prompt; of each that is the first of so many `leaving` ones, as far as it came before it was aborted."""
    engine = engine_of(llm)
    outputs = [engine.add(str(index), prompt, params) for index, (prompt, params) in enumerate(asked)]
    going = [index for index in range(len(asked)) if leaving and index % leaving == 0]
    while engine.has_work:
        engine.step()
        left = [index for index in going if len(outputs[index].outputs[0].token_ids) > index % LENGTH]
        engine.abort([str(index) for index in left])
        going = [index for index in going if index not in left]
    return [list(output.outputs[0].token_ids) for output in outputs]


def questions(llm: LLM, count: int) -> list[list[int]]:
    texts = [f"{wish} {hero} {place}." for place, wish, hero in product(PLACES, WISHES, HEROES)]
    return [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts[:count]]


def similar(count: int) -> list[list[int]]:
    """Prompts of tiny models: many begin alike, and some are longer than a window and a step."""
    dice = random.Random(3)
    heads = [dice.choices(TOKENS, k=length) for length in (8, 19, 70)]
    return [heads[index % 3] + dice.choices(TOKENS, k=1 + index % 30) for index in range(count)]


def hush_others(file: Path) -> None:
    """Have heads that use the model's output layer guess what it may say, too: others score next to nothing."""
    weights = load_file(file)
    scores = weights["lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"]
    may = torch.zeros(len(scores), dtype=torch.bool)
    may[TOKENS] = True
    scores[~may] *= 0.01
    save_file(weights, file, metadata={"format": "pt"})


def make_target(family: str, count: int, folder: Path) -> Target:
    model, bound = family, {}
    if family in TINY:
        model, bound = str(make_tiny_model(folder)), {"allowed_token_ids": TOKENS, "ignore_eos": True}
        if family != "llama":
            (folder / "model.safetensors").unlink()
            make_checkpoint(family, folder, vocab_size=288, eos_token_id=1)
        if family == "qwen3_next":
            changes = {"layer_types": ["full_attention"], "vocab_size": 288, "num_hidden_layers": 1}
            add_prediction(folder, family, "qwen", **changes)
        hush_others(folder / "model.safetensors")
    with LLM(model, speculation="off", **OPTIONS) as llm:
        prompts = questions(llm, count) if family == EMBEDDED else similar(count)
        sampled = [
            SamplingParams(temperature=t, seed=n, max_tokens=LENGTH, **bound) for t in (0, 1) for n in range(count)
        ]
        asked = [Asked(prompt, params) for prompt, params in zip(prompts * 2, sampled, strict=True)]
        return Target(model, asked, answers(llm, asked))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Target]:
    @cache
    def target(family: str, count: int) -> Target:
        return make_target(family, count, tmp_path_factory.mktemp(family))

    return target


Guessing = AbstractContextManager[dict[str, Any]]
"""Options of an engine that has somebody guess."""


def proposer(name: str) -> Callable[[Target, Path], Guessing]:
    return lambda target, folder: nullcontext({"proposer": name})


def own_layer(target: Target, folder: Path) -> Guessing:
    return nullcontext({"draft_model": "mtp"})


def draft_model(target: Target, folder: Path) -> Guessing:
    smaller = "kvern-1m" if target.model == EMBEDDED else str(make_tiny_model(folder))
    return nullcontext({"draft_model": smaller})


def eagle(target: Target, folder: Path) -> Guessing:
    write_eagle(folder, resolve_model(target.model))
    return nullcontext({"draft_model": str(folder)})


def eagle3(target: Target, folder: Path) -> Guessing:
    embedded, known = target.model == EMBEDDED, torch.tensor(TOKENS)
    weights = write_eagle(folder, resolve_model(target.model), drafted=1000 if embedded else len(TOKENS))
    if not embedded:
        marks = torch.zeros(288, dtype=torch.bool).index_fill_(0, known, True)
        save_file(weights | {"d2t": known - torch.arange(len(TOKENS)), "t2d": marks}, folder / "model.safetensors")
    return nullcontext({"draft_model": str(folder)})


def medusa(target: Target, folder: Path) -> Guessing:
    embedded = target.model == EMBEDDED
    write_medusa(folder, resolve_model(target.model), drafted=None if embedded else len(TOKENS))
    if not embedded:
        save_file(load_file(folder / MEDUSA_FILE) | {"token_map": torch.tensor(TOKENS)}, folder / MEDUSA_FILE)
    return nullcontext({"draft_model": str(folder)})


@contextmanager
def remote(target: Target, folder: Path) -> Iterator[dict[str, Any]]:
    """Another kvern, or one that knows what a tiny model says and is wrong at every seventh place."""
    if target.model == EMBEDDED:
        with serving("kvern-1m", "--max-model-len", "128", "--threads", "1") as server:
            yield {"proposer": "remote", "draft_url": server.url}
        return
    texts: dict[tuple[int, ...], list[list[int]]] = {}
    for asked, answer in zip(target.asked, target.expected, strict=True):
        texts.setdefault(tuple(asked.prompt[:8]), []).append(asked.prompt + answer)

    def guessed(prompt: list[int], count: int) -> list[int]:
        alike = (text for text in texts[tuple(prompt[:8])] if text[: len(prompt)] == prompt)
        known = next(alike, prompt)[len(prompt) :][:count]
        return [token if (len(prompt) + ahead) % 7 else 3 for ahead, token in enumerate(known)]

    def answer(body: Body) -> Body:
        found = [guessed(prompt, body["max_tokens"]) for prompt in body["prompt"]]
        return {"choices": [{"index": index, "token_ids": drafts} for index, drafts in enumerate(found)]}

    with drafts_served() as (server, url):
        server.answer, server.models = answer, {"data": [{"id": "small", "max_model_len": 128}]}
        yield {"proposer": "remote", "draft_url": url}


class UpToFive(AnyLength):
    """As many of each, whatever becomes of them."""

    def most(self, requests: Sequence[Request], running: int) -> list[int]:
        return [5] * len(requests)


GUESSING: dict[str, Callable[[Target, Path], Guessing]] = {
    "ngram": proposer("ngram"),
    "suffix": proposer("suffix"),
    "remote": remote,
    "draft model": draft_model,
    "eagle": eagle,
    "eagle3": eagle3,
    "medusa": medusa,
    "mtp": own_layer,
}
HEADS = ("eagle", "eagle3", "medusa")
"""Of random weights, which are right by chance alone, and seldom so among the tokens of the embedded model."""
SAMPLE = {
    ("gemma3", "eagle3", "little room"),
    ("qwen3_next", "mtp", "room"),
    ("llama", "remote", "little room, not cached"),
}


def cases() -> Iterator[Any]:
    for family, guessing, variant in product([EMBEDDED, *TINY], GUESSING, VARIANTS):
        if guessing != "mtp" or family == "qwen3_next":
            names = f"{family}, {guessing}, {variant}"
            if (family, guessing, variant) in SAMPLE:
                yield pytest.param(family, guessing, variant, FEW, id=f"{names}, few")
            count = ALL if family == EMBEDDED else SOME
            yield pytest.param(family, guessing, variant, count, id=names, marks=pytest.mark.nightly)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "guessing", "variant", "count"), [*cases()])
def test_tokens_are_those_without_drafts(
    family: str,
    guessing: str,
    variant: str,
    count: int,
    targets: Callable[[str, int], Target],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every seventh request is aborted."""
    wait_for_answers(monkeypatch)
    target = targets(family, count)
    with (
        GUESSING[guessing](target, tmp_path) as options,
        LLM(target.model, **OPTIONS | VARIANTS[variant], **options) as llm,
    ):
        core: Any = core_of(llm)
        on_device = 3 if "draft_model" in options else 0
        core.drafting = UpToFive(proposer_of(llm), vocab_size_of(llm), on_device)
        found, statistics = answers(llm, target.asked, leaving=7), llm.statistics()
        core.scheduler.check_integrity()
    ended = [
        tokens[: len(mine)] if place % 7 == 0 else tokens
        for place, (tokens, mine) in enumerate(zip(target.expected, found, strict=True))
    ]
    assert [place for place, pair in enumerate(zip(found, ended, strict=True)) if pair[0] != pair[1]] == []
    assert statistics.draft_tokens > count // 8
    assert statistics.accepted_tokens > 0 or (family == EMBEDDED and guessing in HEADS)
    assert statistics.preemptions > 0 or family == "gemma3" or "little room" not in variant
