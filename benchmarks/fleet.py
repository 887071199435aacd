"""A fleet of estimated H200 cards that serves an 8B model: how fast it is simulated, and what it takes.

    python benchmarks/fleet.py speed [--replicas 1000] [--requests 1000000] [--shards 50] [--output FILE]
    python benchmarks/fleet.py cards [--seconds 300] [--output FILE]

`speed` runs one load on a large fleet and prints its figures, the seconds and the memory that it took. `cards` takes a
quarter of 10 million requests a day, at an hour with twice the mean rate, and finds the fewest cards that keep 99 % of
answers within limits, with and without KV tiers and prefill engines of their own; it prints a table in Markdown. Steps
cost what `kvern plan` estimates: none was measured. No weights are needed; the model is Llama 3.1 8B by its
configuration.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvern.bench.record import keep
from kvern.config import EngineConfig
from kvern.loads.source import read_load
from kvern.planning.choice import model_of
from kvern.planning.estimate import Workload
from kvern.planning.hardware import parse_hardware
from kvern.simulate.report import read_slo
from kvern.simulate.roofline import estimated_condition
from kvern.simulate.study import Condition, resolved, run_once

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TALKS = "input=lognormal:400:0.9:4000,output=lognormal:220:0.7:1000,prefix=512:64:1,turns=uniform:1:6"
"""Conversations: 3.5 requests each, of which later ones have the earlier ones in their prompts."""
TURNS = 3.5
SLO = "ttft=500ms,itl=20ms"
GOOD = 0.99
DAILY = 10_000_000
PEAK = 2
"""The rate of the busiest hour as a multiple of the mean."""
PARTS = 4
MOST_CARDS = 6
KINDS = {
    "all do both": {},
    "with host memory": {"tier": "host:256GB"},
    "one computes prompts": {"split": "1+{decode}"},
    "one computes prompts, 256 GB": {"split": "1+{decode}", "tier": "host:256GB"},
}
Figures = dict[str, Any]


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "cards"])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=50)
    parser.add_argument("--rate", type=float, default=0.6, help="requests a second of each engine")
    parser.add_argument("--seconds", type=float, default=300, help="of the load of cards")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    found = speed(options) if options.what == "speed" else cards(options.seconds)
    keep(options.output, "fleet", None, vars(options), findings={options.what: found})


def engine() -> Condition:
    """Returns an engine on one H200, as it is estimated."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
        model = model_of(EngineConfig(folder, load_format="dummy"), Path(folder))
    return estimated_condition(model, parse_hardware("h200"), Workload())[0]


def speed(options: argparse.Namespace) -> Figures:
    """Runs a large fleet once."""
    condition = resolved(engine(), {"replicas": str(options.replicas), "shards": str(options.shards)})
    conversations = options.rate * options.replicas / TURNS
    text = f"rate={conversations:.4f},requests={options.requests},{TALKS},think=20s"
    begun, before = time.monotonic(), _processor_seconds()
    load = list(read_load(text))
    drawn = time.monotonic()
    figures = run_once(condition, load, 0, read_slo(SLO))
    seconds = time.monotonic() - begun
    own, children = (resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cores = len(os.sched_getaffinity(0))
    processor = _processor_seconds() - before
    # each process counts what it shares with the first one, too
    memory = (own.ru_maxrss + min(cores, options.shards) * children.ru_maxrss) / 1e6
    found = {
        "load": text,
        "replicas": options.replicas,
        "shards": options.shards,
        "cores": cores,
        "seconds": seconds,
        "seconds_to_draw": drawn - begun,
        "processor_seconds": processor,
        "most_gigabytes": memory,
        "figures": figures,
    }
    print(
        f"{len(load):,} requests on {options.replicas:,} engines in {options.shards} groups: {seconds:,.0f} s on "
        f"{cores} cores, {processor:,.0f} s of a core, {1000 * processor / len(load):.2f} ms a request, "
        f"{figures['generated_tokens'] / processor:,.0f} tokens of answers a second of a core; at most {memory:.1f} GB"
    )
    json.dump(figures, sys.stdout, indent=1)
    print()
    return found


def _processor_seconds() -> float:
    usages = (resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def cards(seconds: float) -> Figures:
    """Finds the fewest cards of each kind for a quarter of a day's load at its peak."""
    rate = PEAK * DAILY / 86400 / PARTS
    text = f"rate={rate / TURNS:.3f},requests={round(rate * seconds)},{TALKS},think=60s"
    load = list(read_load(text))
    heads = "engines", "cards", "good", "TTFT p99, ms", "ITL p99, ms", "cached", "from tiers", "handed over", "use"
    print(f"{text}: {rate:.1f} requests a second\n")
    print(f"| {' | '.join(heads)} | a day, of 1,000 |\n|{'---|' * (len(heads) + 1)}")
    found = []
    for name, options in KINDS.items():
        for count in range(2, MOST_CARDS + 1):
            given = {key: value.format(decode=count - 1) for key, value in options.items()}
            more = {} if "split" in given else {"replicas": str(count)}
            figures = run_once(resolved(engine(), given | more), load, 0, read_slo(SLO))
            found.append({"kind": name, "cards": count, "options": given, "figures": figures})
            shares = [figures.get(key, 0.0) for key in ("cache_hit_share", "tier_hit_share", "handed_share", "use")]
            good = figures["good_share"]
            daily = f"{1000 * rate / count * 86400 / PEAK / 1e6:,.0f} M" if good >= GOOD else ""
            times = (f"{figures[f'p99_{key}_ms']:,.0f}" for key in ("ttft", "itl"))
            cells = f"{good:.1%}", *times, *(f"{share:.0%}" for share in shares), daily
            print(f"| {name} | {count} | {' | '.join(cells)} |", flush=True)
            if good >= GOOD:
                break
    return {"load": text, "requests_per_second": rate, "runs": found}


if __name__ == "__main__":
    main()
