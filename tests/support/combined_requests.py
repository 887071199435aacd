"""Batches of requests with combined features, and engines of random models for them."""

import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvern
from kvern import SamplingParams
from tests.support.combined_features import ADAPTERS, FEATURES, Alone, Ask
from tests.support.combined_questions import QUESTIONS
from tests.support.families import make_checkpoint
from tests.support.model_features import QUERIES
from tests.support.peft_adapters import make_adapter


def asks_with(features: frozenset[str], times: int) -> list[Ask]:
    """Each question so many times, with all these features."""
    asks = []
    for number, question in enumerate(QUESTIONS * times):
        ask = Ask(question, SamplingParams(temperature=0.6, seed=10 * number, max_tokens=88), features=features)
        for name, feature in FEATURES.items():
            if name in features:
                ask = feature.ask(ask, number)
        asks.append(ask)
    return asks


def plain_asks() -> list[Ask]:
    """The company: requests that ask for nothing."""
    return [Ask(question, SamplingParams(temperature=0, max_tokens=80)) for question in QUESTIONS]


def too_little_room(asks: Sequence[Ask], alone: Alone) -> int:
    """Tokens for the longest of them, or for two prompts and not all of their answers."""
    prompts = {ask: len(alone(ask).output.prompt_token_ids) for ask in asks if ask.features}
    longest = max(prompt + (ask.params.max_tokens or 0) for ask, prompt in prompts.items())
    return max(longest, 2 * statistics.median_low(prompts.values()) + 24)


def random_model(family: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """Options of an engine with a tiny model of a family, and with adapters that are called like the embedded one's."""
    embedded = Path(kvern.__file__).parent / "embedded" / "kvern-1m"
    config = json.loads((embedded / "config.json").read_text())
    sizes = {name: config[name] for name in ("vocab_size", "eos_token_id", "max_position_embeddings")}
    model = make_checkpoint(family, folder / "model", **sizes, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded / name, model)
    adapters = {
        name: make_adapter(model, folder / name, seed, target_modules=QUERIES) for seed, name in enumerate(ADAPTERS)
    }
    return {"model": str(model), "adapters": {name: str(made) for name, made in adapters.items()}}


TOGETHER = [
    frozenset(["structured", "n", "logprobs", "LoRA"]),
    frozenset(["structured", "tools", "logprobs", "DRY"]),
    frozenset(["structured", "beams", "n", "LoRA", "DRY"]),
    frozenset(["tools", "beams", "logprobs"]),
    frozenset(["tools", "n", "LoRA"]),
]
