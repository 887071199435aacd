"""The division of the model among this machine's devices, and whether it must be smaller for that."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from kvern.config import EngineConfig
from kvern.deploy.description import device_names
from kvern.deploy.discover import FALLBACK, Discovered
from kvern.deploy.stage import Part, Work
from kvern.deploy.workload import Workload as Load
from kvern.deploy.workload import read_workload
from kvern.errors import ConfigError
from kvern.io.files import as_size
from kvern.models.folder import model_folder
from kvern.models.loader import read_config
from kvern.planning.choice import model_of, ranked, runnable, verdict
from kvern.planning.estimate import Estimate, Model, Workload, seconds_of
from kvern.planning.hardware import Card, names_of, this_machine

ONLINE: tuple[Literal["int8"], Literal["fp8"]] = "int8", "fp8"
"""Formats of 8 bits by which a quantized model is estimated, on a CPU and on a GPU."""
AT_ONCE = 64
"""Requests that are taken to run at a time, of a load that arrives over time."""


class Planned(msgspec.Struct):
    """A plan. `options`: the split, as options of the engine. `batch`: requests that decode at a time in an engine.

    `smaller`: why weights must be quantized; empty: they need not. `formats`: those that they may have; empty: all.
    `lacks`: why plain weights cannot run. `seconds`: the estimate of the workload on one engine; 0 without an estimate.
    """

    cards: str
    options: dict[str, Any] = {}
    batch: int = 0
    cache_tokens: int = 0
    weights: int = 0
    decode_one: float = 0.0
    decode: float = 0.0
    first_token: float = 0.0
    rate: float = 0.0
    seconds: float = 0.0
    verdict: str = ""
    lacks: str = ""
    smaller: str = ""
    formats: list[str] = []


def context_of(work: Work) -> tuple[int, int]:
    """Returns the size of the model's vocabulary, and its context; of a model without a family by its config.json."""
    config = read_config(model_folder(EngineConfig(work.of(Discovered).outline)))
    text = config.get("text_config", config)
    context = next((text[name] for name in ("max_position_embeddings", "n_positions") if text.get(name)), 1024)
    return int(text.get("vocab_size", 32_000)), int(context)


def load_of(work: Work) -> Load:
    """Returns the workload that was asked for. Raises ConfigError."""
    return read_workload(work.asked.workload, *context_of(work), torch.cuda.is_available())


def as_planned(load: Load) -> Workload:
    """Returns a workload as the planner describes it: the mean of its lengths."""
    prompts, answers = (sum(lengths) // len(load.requests) for lengths in zip(*load.lengths, strict=True))
    count = len(load.requests) if load.at_once else min(AT_ONCE, len(load.requests))
    return Workload(count, max(prompts, 1), max(answers, 1))


class Plan:
    """The second stage: the code of `kvern plan`, on this machine and for the workload."""

    name = "plan"
    result = Planned

    def inputs(self, work: Work) -> Mapping[str, Any]:
        """The machine, the workload, and what is asked for."""
        asked = work.asked
        load = load_of(work)
        told = [load.text, load.lengths, [request.arrival for request in load.requests]]
        return {"devices": device_names(), "workload": told, "memory": asked.memory, "target": dict(asked.target)}

    def run(self, work: Work) -> Planned:
        """Compares the ways. Raises ConfigError if the model fits in no way, quantized or not."""
        found = work.of(Discovered)
        if found.family == FALLBACK:
            return Planned(", ".join(device_names()), verdict="transformers computes it, and nobody estimates that")
        config = EngineConfig(found.outline)
        folder = model_folder(config)
        load = load_of(work)
        estimates, model, cards = estimated(config, folder, load, work.asked.memory)
        best = estimates[0]
        choice = verdict(estimates)
        smaller = reason(best, work.asked.target)
        formats: list[str] = []
        if smaller and found.quantized is None:
            online = ONLINE[not cards[0].host]
            others, other, _ = estimated(replace(config, quantization=online), folder, load, work.asked.memory, cards)
            helps = (not others[0].lacks) if best.lacks else others[0].decode < best.decode
            if helps:
                best = replace(others[0], lacks=best.lacks)
                model = other
                choice = verdict(others)
                if cards[0].rate_8bit > cards[0].rate and not reason(others[0], work.asked.target):
                    formats = [online]  # it is enough; 4 bits would be slower for many requests, and less accurate
            else:
                smaller = ""
        memory = work.asked.memory
        limited = "" if memory is None else f", of which {as_size(memory)} may be used (--memory)"
        if best.lacks and (found.quantized is not None or not smaller or work.asked.max_loss is None):
            allow = "; allow a loss for fewer bits by --max-loss 1%" if smaller and found.quantized is None else ""
            raise ConfigError(f"{found.model} does not fit {names_of(cards)}{limited}: {best.lacks}{allow}")
        if found.quantized is not None or work.asked.max_loss is None:
            smaller = ""
        return Planned(
            cards=names_of(cards) + limited,
            options={name: value for name, value in best.split.options.items() if value not in (1, False)},
            batch=best.batch,
            cache_tokens=best.cache_tokens,
            weights=int(best.weights),
            decode_one=best.decode_one,
            decode=best.decode,
            first_token=best.first_token,
            rate=best.rate,
            seconds=seconds_of(model, cards[0], best.split, load.part(best.split.data).lengths, max(best.batch, 1)),
            verdict=choice,
            lacks=best.lacks,
            smaller=smaller,
            formats=formats,
        )

    def stands(self, work: Work, result: Planned) -> bool:
        """True: it has no files."""
        return True

    def report(self, result: Planned) -> Part:
        """The plan in figures."""
        split = ", ".join(f"{name} {value}" for name, value in result.options.items()) or "one device"
        rows = [("devices", result.cards), ("split", split)]
        if result.rate:
            rows += [
                ("weights of a device", as_size(result.weights)),
                ("tokens of cache", f"{result.cache_tokens:,}"),
                (
                    "step",
                    f"{1000 * result.decode_one:.3f} ms, {1000 * result.decode:.3f} ms with {result.batch} requests",
                ),
                ("first token of a prompt alone", f"{1000 * result.first_token:.1f} ms"),
                ("workload", f"{result.seconds:.3f} s"),
            ]
        rows.append(("choice", result.verdict))
        if result.smaller:
            rows.append(("fewer bits", result.smaller))
        return Part(rows)


def estimated(
    config: EngineConfig, folder: Path, load: Load, memory: int | None, cards: Sequence[Card] | None = None
) -> tuple[list[Estimate], Model, Sequence[Card]]:
    """Returns the estimates of all ways, the best first, with the model and the devices. Raises KvernError.

    `cards`: of this machine, if they are known.
    """
    model = model_of(config, folder)
    cards = this_machine(config, model.dtype) if cards is None else cards
    allowed = [replace(card, memory=min(card.memory, float(memory or card.memory))) for card in cards]
    return ranked(model, allowed, as_planned(load), runnable(config, folder, model)), model, cards


def reason(best: Estimate, target: Mapping[str, float]) -> str:
    """Returns why plain weights are too many: memory, or a target; empty if they are not."""
    if best.lacks:
        return best.lacks
    limit = target.get("itl")
    if limit is not None and best.decode > limit:
        took = f"{1000 * best.decode:.2f} ms"
        return f"a step of {best.batch} requests would take {took}, above the target's {1000 * limit:g}"
    return ""
