"""Numbers of the bundle as it will be served, each beside its limit; one that misses it fails the deployment.

- loss: of quantized weights against plain ones, on text that calibration has not seen
- greedy agreement: tokens that both models find the most probable, and answers up to the first other token
- needle: tokens that are found again at the context's full length
- structured answers: all must follow their schema
- speed: of the workload beside the plan, the plan's options, and the target
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from kvern.config import EngineConfig
from kvern.deploy.description import device_names
from kvern.deploy.plan import Planned, load_of
from kvern.deploy.quantize import Quantized, release, texts_of
from kvern.deploy.shard import Sharded
from kvern.deploy.stage import TARGETS, Part, Work
from kvern.deploy.tune import Measuring, Tuned, as_options, engine_options
from kvern.deploy.tuner import FEWEST, Trial
from kvern.llm import LLM
from kvern.quantize.blocks import Walk
from kvern.quantize.checkpoint import Checkpoint
from kvern.quantize.mixed import Budget, measure_folder
from kvern.request.sampling_params import SamplingParams, StructuredOutput
from kvern.runner.device import resolve_device

PROMPT, ANSWER = 64, 32
"""Tokens of a prompt and of a greedy answer."""
PROMPTS = 16
NEEDLE, SHOWN = 24, 16
"""Tokens of a needle, and of those that are repeated at the end; the model is to go on with the others."""
DEPTHS = 0.1, 0.5, 0.9
LEAST_AGREEMENT = 0.8
"""The least share of tokens that the bundle and the plain model must have in common: a guard against what is broken,
as the loss is what was asked for."""
LOST_NEEDLES = 0.1
"""The share of a needle's tokens that the bundle may lose against the plain model."""
NAMES = ["Ada", "Bo", "Cy"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": NAMES},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_member": {"type": "boolean"},
    },
    "required": ["name", "age", "is_member"],
    "additionalProperties": False,
}
QUESTIONS = 4
STRUCTURED_TOKENS = 96


class Verified(msgspec.Struct):
    """The numbers; those of the plain model are None where it does not fit this machine."""

    loss: float | None = None
    perplexity: float | None = None
    plain_perplexity: float | None = None
    agreement: float | None = None
    answers: float | None = None
    needle: float = 0.0
    plain_needle: float | None = None
    context: int = 0
    structured: float = 0.0
    seconds: list[float] = []
    costs: list[float] = []
    plan_costs: list[float] = []
    predicted: float = 0.0
    tokens_per_second: float = 0.0
    ttft: float = 0.0
    itl: float = 0.0
    limits: dict[str, float] = {}
    failed: list[str] = []


class Verify:
    """The sixth stage."""

    name = "verify"
    result = Verified

    def inputs(self, work: Work) -> Mapping[str, Any]:
        """The limits, and the machine."""
        return {"devices": device_names(), "max_loss": work.asked.max_loss, "target": dict(work.asked.target)}

    def run(self, work: Work) -> Verified:
        """Measures everything, and says what missed its limit. Raises KvernError."""
        found = Verified(predicted=work.of(Planned).seconds)
        folder = Path(work.of(Sharded).folder)
        options = engine_options(work) | as_options(work.of(Tuned).options)
        held = texts_of(work, folder)[1]
        if work.of(Quantized).folder is not None:
            self._lose(work, held, found)
        with LLM(**options) as llm:
            context = llm.max_model_len
            length = min(PROMPT, context - ANSWER)
            prompts = [row[:length].tolist() for row in held[:PROMPTS]]
            needles = needles_of(held, context, llm.spec.vocab_size)
            answers = greedy(llm, prompts)
            found.context = context
            found.needle = recalled(llm, needles)
            found.structured = structured(llm)
        if not work.of(Planned).lacks:
            plain = {"model": str(folder), **work.of(Sharded).options, "max_model_len": context}
            with LLM(**plain) as llm:
                found.answers = agreement(greedy(llm, prompts), answers)
                found.plain_needle = recalled(llm, needles)
        self._time(work, found)
        found.limits = limits(work)
        found.failed = failures(found, found.limits)
        return found

    def _lose(self, work: Work, held: Tensor, found: Verified) -> None:
        checkpoint = Checkpoint(Path(work.of(Sharded).folder), resolve_device(EngineConfig()))
        walk = Walk(checkpoint, held)
        for index in range(walk.layers):
            walk.advance(walk.block(index))
        measured = measure_folder(work.folder / str(work.of(Quantized).folder), walk, held)
        found.loss = measured["loss"]
        found.perplexity = measured["perplexity"]
        found.plain_perplexity = measured["plain_perplexity"]
        found.agreement = measured["agreement"]
        del walk, checkpoint
        release()

    def _time(self, work: Work, found: Verified) -> None:
        """Runs the workload with the options, and with those of the plan; the median run counts."""
        tuned = work.of(Tuned)
        measuring = Measuring(engine_options(work), load_of(work), work.asked.target)
        runs = []
        try:
            for _ in range(FEWEST):
                found.costs.append(measuring(tuned.options))
                runs += [] if measuring.last is None else [measuring.last]
            if tuned.tried and tuned.tried[0].options != tuned.options:
                for _ in range(FEWEST):
                    found.plan_costs.append(measuring(tuned.tried[0].options))
        finally:
            measuring.close()
        found.seconds = [run.seconds for run in runs]
        if runs:
            found.tokens_per_second = statistics.median(run.tokens_per_second for run in runs)
            found.ttft = statistics.median(run.ttft for run in runs)
            found.itl = statistics.median(run.itl for run in runs)

    def stands(self, work: Work, result: Verified) -> bool:
        """True: it has no files."""
        return True

    def report(self, result: Verified) -> Part:
        """Each number beside its limit."""
        rows = [(name, text) for name, text in _rows(result) if text]
        return Part(rows)


def limits(work: Work) -> dict[str, float]:
    """Returns the limits that count for this deployment."""
    found = dict(work.asked.target)
    if work.asked.max_loss is not None:
        found["loss"] = Budget(loss=work.asked.max_loss).nats
    return found


def failures(found: Verified, limits: Mapping[str, float]) -> list[str]:
    """Returns a line for each number that missed its limit."""
    failed = []
    if found.loss is not None and "loss" in limits and not lost(found) <= limits["loss"]:
        failed.append(
            f"loss is {lost(found):.4g} nats a token on text that calibration has not seen: at most "
            f"{limits['loss']:.4g} is allowed (--max-loss)"
        )
    common = found.agreement if found.agreement is not None else found.answers
    if common is not None and common < LEAST_AGREEMENT:
        failed.append(
            f"greedy agreement with the plain model is {common:.1%}: at least {LEAST_AGREEMENT:.0%} is needed"
        )
    if found.plain_needle is not None and found.needle < found.plain_needle - LOST_NEEDLES:
        failed.append(
            f"needle: {found.needle:.0%} of its tokens are found again at {found.context:,} tokens, and the plain "
            f"model finds {found.plain_needle:.0%}"
        )
    if found.structured < 1:
        failed.append(f"structured answers: {found.structured:.0%} follow their schema, and all must")
    for name in TARGETS:
        value = getattr(found, name)
        if name in limits and value > limits[name]:
            failed.append(
                f"{name} is {1000 * value:.1f} ms (99 of 100): the target is {1000 * limits[name]:g} ms (--target)"
            )
    if found.plan_costs and Trial({}, found.costs).interval[0] > Trial({}, found.plan_costs).interval[1]:
        slower = _mean(found.costs) / _mean(found.plan_costs) - 1
        failed.append(f"the tuned options take {slower:.0%} longer than those of the plan: tune again")
    if any(map(math.isinf, found.costs)):
        failed.append("the workload does not run with the tuned options: tune again")
    return failed


def lost(found: Verified) -> float:
    """Returns the loss in nats a token: of the distribution, or of perplexity if that is larger."""
    assert found.loss is not None and found.perplexity is not None and found.plain_perplexity is not None
    return max(found.loss, math.log(found.perplexity / found.plain_perplexity))


def greedy(llm: LLM, prompts: Sequence[list[int]]) -> list[Sequence[int]]:
    """Returns the most probable tokens after each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params)]


def agreement(plain: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> float:
    """Returns the share of answers' tokens before the first one that differs."""
    same = 0
    for one, other in zip(plain, found, strict=True):
        apart = (number for number, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        same += next(apart, len(one))
    return same / max(sum(map(len, plain)), 1)


def needles_of(held: Tensor, context: int, vocabulary: int) -> list[tuple[list[int], list[int]]]:
    """Returns prompts that fill the context, with random tokens at some depth and the first of them at the end, and the
    tokens that are to follow."""
    random = torch.Generator().manual_seed(0)
    text = held.flatten().tolist()
    found = []
    for depth in DEPTHS:
        needle = torch.randint(vocabulary // 2, vocabulary, (NEEDLE,), generator=random).tolist()
        length = context - 2 * NEEDLE
        filler = (text * (length // len(text) + 1))[:length]
        at = int(depth * length)
        found.append(([*filler[:at], *needle, *filler[at:], *needle[:SHOWN]], needle[SHOWN:]))
    return found


def recalled(llm: LLM, needles: Sequence[tuple[list[int], list[int]]]) -> float:
    """Returns the share of the needles' tokens that a model goes on with."""
    params = SamplingParams(temperature=0.0, max_tokens=NEEDLE - SHOWN, ignore_eos=True)
    right = 0
    for prompt, rest in needles:  # one at a time, as caches may have room for one sequence of this length
        [output] = llm.generate([prompt], params)
        right += sum(a == b for a, b in zip(output.outputs[0].token_ids, rest, strict=False))
    return right / sum(len(rest) for _, rest in needles)


def structured(llm: LLM) -> float:
    """Returns the share of answers that follow a schema."""
    texts = [f"Describe person {number} as JSON:\n" for number in range(QUESTIONS)]
    params = [
        SamplingParams(
            temperature=1.0, seed=number, max_tokens=STRUCTURED_TOKENS, structured=StructuredOutput(json=SCHEMA)
        )
        for number in range(QUESTIONS)
    ]
    outputs = llm.generate(texts, params)
    return sum(_follows(output.outputs[0].text) for output in outputs) / QUESTIONS


def _follows(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if not isinstance(value, dict) or set(value) != {"name", "age", "is_member"}:
        return False
    age = value["age"]
    return value["name"] in NAMES and isinstance(value["is_member"], bool) and isinstance(age, int) and 0 <= age <= 99


def _rows(found: Verified) -> list[tuple[str, str]]:
    limit = found.limits
    rows = []
    if found.loss is not None and found.perplexity is not None and found.plain_perplexity is not None:
        allowed = f"; allowed: {limit['loss']:.4g}" if "loss" in limit else ""
        change = found.perplexity / found.plain_perplexity - 1
        rows.append(("loss", f"{found.loss:.4g} nats a token, perplexity {change:+.2%}, on unseen text{allowed}"))
    if found.agreement is not None:
        rows.append(("greedy agreement", f"{found.agreement:.1%} of tokens; at least {LEAST_AGREEMENT:.0%}"))
    if found.answers is not None:
        rows.append(("greedy answers", f"{found.answers:.1%} of {ANSWER} tokens before the first that differs"))
    plain = "" if found.plain_needle is None else f"; the plain model: {found.plain_needle:.0%}"
    rows.append(("needle", f"{found.needle:.0%} of its tokens at {found.context:,} tokens{plain}"))
    rows.append(("structured answers", f"{found.structured:.0%} follow their schema; all must"))
    seconds = _mean(found.seconds)
    told = f"{seconds:.4g} s"
    if found.predicted:
        told += f", {seconds / found.predicted - 1:+.0%} against the estimate of {found.predicted:.3f} s"
    rows.append(("workload", told))
    rows.append(("rate", f"{found.tokens_per_second:,.0f} generated tokens/s"))
    for name, what in TARGETS.items():
        told = f"; target: {1000 * limit[name]:g}" if name in limit else ""
        rows.append((f"{what} (99 of 100)", f"{1000 * getattr(found, name):.1f} ms{told}"))
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
