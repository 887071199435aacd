"""What LoRA adapters cost: tokens a second of a decoding batch without adapters, with one, and with eight mixed.

    python benchmarks/adapters.py --model FOLDER --load-format dummy      # config.json is enough
    python benchmarks/adapters.py --model kvern-12m --batch 16 --tokens 32

Two engines of the same model, one without and one with places for adapters, take turns, round after round, so that
whatever else the machine does hits all cases alike. The adapters have random weights for every linear layer. A round
counts the steps in which all requests decode. Ratios are of medians; none of the cases shares a prompt.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvern import SamplingParams
from kvern.adapters.peft import targets_of
from kvern.bench.record import Case, figure, keep
from kvern.config import EngineConfig
from kvern.engine.engine import Engine
from kvern.layers.build import Build
from kvern.models.decoder import Decoder
from kvern.models.hub import resolve_model
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config

PROMPT = 32


def make_adapter(model: Path, folder: Path, rank: int, seed: int) -> None:
    """Random weights beside every linear layer of a model whose checkpoint has Llama's names."""
    spec = spec_from_config(read_config(model))
    targets = targets_of(Decoder(spec, Build(torch.bfloat16, torch.device("meta"), 1)))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parts in targets.items():
        if len(parts) == 1:
            inputs, outputs = parts[0].inputs.whole, parts[0].width
            down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            up = torch.randn(outputs, rank, generator=generator) * 0.01
            weights[f"base_model.model.{name}.lora_A.weight"] = down.bfloat16()
            weights[f"base_model.model.{name}.lora_B.weight"] = up.bfloat16()
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def decode(engine: Engine, batch: int, tokens: int, adapters: list[str | None], dice: random.Random) -> float:
    """Tokens a second while `batch` requests decode `tokens` each, which use the adapters in turn."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for number, adapter in zip(range(batch), itertools.cycle(adapters)):
        prompt = [dice.randrange(engine.spec.vocab_size) for _ in range(PROMPT)]
        engine.add(str(number), prompt, params, adapter=adapter)
    before = engine.statistics().generation_tokens
    while engine.statistics().generation_tokens - before < 2 * batch:  # prompts, and a step to begin with
        engine.step()
    began, counted = time.perf_counter(), engine.statistics().generation_tokens
    while engine.has_work:
        engine.step()
    return (engine.statistics().generation_tokens - counted) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvern-12m")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8, help="of the mixed case")
    parser.add_argument("--max-adapter-rank", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    length = PROMPT + arguments.tokens
    options = {
        "model": arguments.model,
        "load_format": arguments.load_format,
        "max_model_len": length,
        "max_batch_requests": arguments.batch,
        "kv_cache_tokens": arguments.batch * (length + 16),
        "prefix_cache": False,
    }
    names: list[str | None] = [f"adapter-{number}" for number in range(arguments.adapters)]
    plain = Engine(EngineConfig(**options))
    places = {"max_adapters": arguments.adapters, "max_adapter_rank": arguments.max_adapter_rank}
    adapted = Engine(EngineConfig(**options, **places))
    with tempfile.TemporaryDirectory() as directory:
        for seed, name in enumerate(filter(None, names)):
            folder = Path(directory, name)
            make_adapter(resolve_model(arguments.model), folder, arguments.rank, seed)
            began = time.perf_counter()
            adapted.load_adapter(name, str(folder))
            size = (folder / "adapter_model.safetensors").stat().st_size
            print(f"{name}: {size / 1e6:.1f} MB read in {time.perf_counter() - began:.2f} s", flush=True)
    cases: dict[str, tuple[Engine, list[str | None]]] = {
        "no places for adapters": (plain, [None]),
        "places, none used": (adapted, [None]),
        "1 adapter": (adapted, names[:1]),
        f"{arguments.adapters} adapters mixed": (adapted, names),
        f"{arguments.adapters} adapters mixed with none": (adapted, [*names, None]),
    }
    dice = random.Random(0)
    rates: dict[str, list[float]] = {case: [] for case in cases}
    for number in range(arguments.rounds + 1):  # the first compiles and captures, and does not count
        for case, (engine, used) in cases.items():
            rate = decode(engine, arguments.batch, arguments.tokens, used, dice)
            print(f"round {number}, {case}: {rate:,.0f} tokens/s", flush=True)
            if number:
                rates[case].append(rate)
    base = statistics.median(next(iter(rates.values())))
    for case, found in rates.items():
        median = statistics.median(found)
        print(f"{case:32} {median:10,.0f} tokens/s ({min(found):,.0f}-{max(found):,.0f})   {median / base:.3f}")
    measured = [Case(case, {"tokens_per_second": figure(found, "tokens/s", "higher")}) for case, found in rates.items()]
    keep(arguments.json, "adapters", arguments.model, vars(arguments), measured)


if __name__ == "__main__":
    main()
