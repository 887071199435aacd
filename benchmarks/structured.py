"""What a structured answer costs: the same requests with and without, in turn, by one engine.

    python benchmarks/structured.py                                          # the embedded model
    python benchmarks/structured.py --model FOLDER --load-format dummy       # a shape with random weights, on a GPU

    records   held-out sentences of which the embedded model writes records anyway, held to the schema of each record:
              a trained model's everyday work (left out with --load-format dummy, which knows no sentences)
    text      random prompts and 128 tokens that a regular expression or a schema with one long text allows
    first     time to the first token of one request with a schema that is new each time, and with none; and how long
              such a schema takes to compile

Every round has all of them in turn. Figures are medians over the rounds, after one that is not counted.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from kvern import LLM, SamplingParams
from kvern.bench.record import Case, figure, keep
from kvern.config import DEFAULT_MODEL
from kvern.models.hub import resolve_model
from kvern.request.sampling_params import StructuredOutput
from kvern.structured.grammar import grammars_of

BATCH = 64
TEXT = {"type": "string", "minLength": 400, "maxLength": 600}
LONG = {"type": "object", "properties": {"text": TEXT, "count": {"type": "integer"}}, "required": ["text", "count"]}
FORMS = {"free": None, "regex": StructuredOutput(regex=r"(.|\n){400,}"), "json": StructuredOutput(json=LONG)}
Figures = dict[str, list[float]]


def rate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Tokens a second."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - start)


def text(llm: LLM, dice: random.Random, figures: Figures) -> None:
    for name, form in FORMS.items():
        prompts = [[dice.randrange(10, min(llm.spec.vocab_size, 2000)) for _ in range(64)] for _ in range(BATCH)]
        params = SamplingParams(temperature=1.0, max_tokens=128, seed=1, structured=form, ignore_eos=form is None)
        figures.setdefault(f"text: {name}", []).append(rate(llm, prompts, [params] * BATCH))


def records(llm: LLM, figures: Figures) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # training/ is not installed
    from training.exam import questions, wanted

    examples = questions("extraction", BATCH)
    prompts = [llm.chat_prompt(example.messages[:-1]) for example in examples]
    forms = [StructuredOutput(json=schema_of(json.loads(wanted(example)))) for example in examples]
    for name, asked in (("free", [None] * BATCH), ("json", forms)):
        params = [SamplingParams(temperature=0.0, max_tokens=128, structured=form) for form in asked]
        figures.setdefault(f"records: {name}", []).append(rate(llm, prompts, params))


def schema_of(record: Any) -> dict[str, Any]:
    """Records like this one."""
    if isinstance(record, list):
        return {"type": "array", "items": {"anyOf": [schema_of(item) for item in record]}}
    if not isinstance(record, dict):
        return {"type": {str: "string", int: "integer", float: "number"}.get(type(record), "null")}
    fields = {key: schema_of(value) for key, value in record.items()}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def first_token(llm: LLM, dice: random.Random, figures: Figures) -> None:
    prompt = [dice.randrange(10, min(llm.spec.vocab_size, 2000)) for _ in range(64)]
    kinds = {"string": "string", "whole": "integer", "amount": "number", "sure": "boolean"}
    fields = {f"{name}_{dice.randrange(10**9)}": {"type": kind} for name, kind in kinds.items() for _ in range(3)}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    for name, form in (("none", None), ("new", StructuredOutput(json=schema))):
        params = SamplingParams(temperature=0.0, max_tokens=4, structured=form)
        start = time.perf_counter()
        next(iter(llm.stream(prompt, params)))
        figures.setdefault(f"first: {name}", []).append(1000 * (time.perf_counter() - start))
    other = StructuredOutput(json=schema | {"title": str(dice.random())})
    start = time.perf_counter()
    grammars_of(resolve_model(llm.config.model), llm.spec.vocab_size).compile(other)
    figures.setdefault("compile", []).append(1000 * (time.perf_counter() - start))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hugging Face id; the embedded model if left out")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    arguments = parser.parse_args()
    dice = random.Random(0)
    figures: Figures = {}
    options = {"load_format": arguments.load_format, "threads": arguments.threads, "max_model_len": 2048}
    with LLM(arguments.model, **options) as llm:
        for _ in range(arguments.rounds + 1):
            text(llm, dice, figures)
            if arguments.load_format != "dummy":
                records(llm, figures)
            for _ in range(4):
                first_token(llm, dice, figures)
    cases = []
    for name, values in figures.items():
        counted = values[len(values) // (arguments.rounds + 1) :]
        middle, low, high = statistics.median(counted), min(counted), max(counted)
        kind, _, form = name.partition(": ")
        beside = figures.get(f"{kind}: free")
        if beside is None:
            cases.append(Case(name, {"milliseconds": figure(counted, "ms")}))
        else:
            rates = figure(counted, "tokens/s", "higher")
            cases.append(Case(name, {"tokens_per_second": rates}, {"batch": BATCH}))
        line = f"{name:15} {middle:10,.1f} {'ms' if beside is None else 'tokens/s'} ({low:,.1f} to {high:,.1f})"
        if beside is not None and form != "free":
            line += f", {middle / statistics.median(beside[1:]):.3f} of free"
        print(line)
    keep(arguments.output, "structured", arguments.model or DEFAULT_MODEL, vars(arguments), cases)


if __name__ == "__main__":
    main()
