"""An engine that treats its requests badly: chunks end anywhere, rows and caches are taken away, and the engine dies.

Whatever happens, the answers are those of transformers.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import RequestOutput, SamplingParams
from kvern.cache.states import StatePool
from kvern.config import EngineConfig
from kvern.engine.engine import Engine
from kvern.engine.factory import build_core
from kvern.request.request import RequestSpec
from kvern.runner.startup import Startup
from kvern.serving.workload import Generation
from tests.support.families import reference_logits, similar_prompts
from tests.support.speculation import AnyLength, Remembered

TOLERANCE = 1e-4
PROMPTS = similar_prompts(131)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=0)
PARAMS = [
    *[GREEDY] * 4,
    SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=6, ignore_eos=True, logprobs=0),
    SamplingParams(beam_width=3, n=3, max_tokens=5, ignore_eos=True, logprobs=0),
]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "block_size": 4,
    "max_model_len": 64,
    "kv_cache_tokens": 128,
    "max_batch_tokens": 64,
    "max_batch_requests": 4,
}
SETUPS: list[dict[str, Any]] = [
    {},
    {"cpu_kernels": False, "prefix_cache": False},
    {"kv_cache": "contiguous", "kv_cache_tokens": 256, "batching": "static", "chunked_prefill": False},
]
"""Options of engines in which each switch of cache and scheduler stands both ways."""


class Interrupted:
    """An engine, its requests, and what happens to them, which follows from the seed."""

    def __init__(self, folder: Path, options: dict[str, Any], seed: int, known: Sequence[list[int]] = ()) -> None:
        self._dice, self._known = random.Random(seed), known
        self._engine = Engine(EngineConfig(model=str(folder), **OPTIONS | options))
        self._specs: list[RequestSpec] = []
        self._chunks = bool(options.get("chunked_prefill", True))
        self._prepare()
        self.preempted = self.restarts = 0

    def answer(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Steps and misfortunes, in turns, until all requests have ended."""
        outputs = []
        for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            outputs.append(self._engine.add(str(number), prompt, own))
            self._specs.append(self._engine.inputs.request(str(number), prompt, own))
        steps, lost_at = 0, self._dice.randint(3, 20)
        while not all(output.finished for output in outputs):
            self._engine.step()
            steps += 1
            if steps == lost_at:
                self._restart(outputs)
            self._disturb()
        scheduler = self._engine.core.scheduler
        scheduler.check_integrity()
        self.preempted += scheduler.preemption_count
        return outputs

    def _prepare(self) -> None:
        core = self._engine.core
        if self._known:
            core.drafting = AnyLength(Remembered(self._known), self._engine.inputs.vocab_size)

    def _disturb(self) -> None:
        """Let the next chunk be of another size; take a row, or what is cached, from whoever has it."""
        dice, scheduler = self._dice, self._engine.core.scheduler
        if self._chunks:
            scheduler.limits = replace(scheduler.limits, max_batch_tokens=dice.randint(4, 14))
        running = list(scheduler.running)
        if running and dice.random() < 0.15:
            scheduler._preempt(dice.choice(running))
        if dice.random() < 0.2:
            scheduler.cache.tree.evict(dice.randint(1, 6))
        states = scheduler.cache.extension(StatePool)
        if states is not None and states.kept and dice.random() < 0.2:
            states.lose(dice.choice(states.kept))

    def _restart(self, outputs: Sequence[RequestOutput]) -> None:
        """Another engine goes on with what its clients know of the requests."""
        self.preempted += self._engine.core.scheduler.preemption_count
        self.restarts += 1
        self._engine.core, *_ = build_core(self._engine.config, self._engine.folder, Startup())
        self._prepare()
        for output, spec in zip(outputs, self._specs, strict=True):
            if not output.finished:
                generation = Generation(output, spec, asyncio.Event(), 0.0, patient=False)
                generation.resumed = True
                message = generation.message()
                self._engine.core.add(message.spec, message.progress)


def check(outputs: Sequence[RequestOutput], folder: Path) -> None:
    """Checks log-probabilities against transformers, and that greedy tokens are the most probable ones."""
    for output, params in zip(outputs, PARAMS, strict=True):
        prompt = output.prompt_token_ids
        assert output.failure is None and len(output.outputs) == params.n
        for answer in output.outputs:
            assert len(answer.token_ids) == params.max_tokens
            rows = reference_logits(folder, [*prompt, *answer.token_ids]).log_softmax(-1)
            expected = rows[len(prompt) - 1 : -1]
            own = expected.gather(1, torch.tensor(answer.token_ids)[:, None]).flatten()
            if params.beam_width is not None:
                assert answer.cumulative_logprob == pytest.approx(float(own.sum()), abs=TOLERANCE * len(own))
                continue
            assert answer.logprobs is not None
            found = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
            assert found == pytest.approx(own.tolist(), abs=TOLERANCE)
            if params.temperature == 0:
                assert bool((own > expected.amax(1) - TOLERANCE).all())
        if params.prompt_logprobs is not None:
            assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
            for place, entry in enumerate(output.prompt_logprobs[1:]):
                assert entry is not None
                said = entry[prompt[place + 1]].logprob
                assert said == pytest.approx(float(rows[place, prompt[place + 1]]), abs=TOLERANCE)


def goes_on_where_it_was(folder: Path) -> bool:
    """Whatever interrupts them, answers are those of transformers; samples and beams, in every setup, the same."""
    known: list[list[int]] = []
    found, preempted = [], 0
    for seed, options in enumerate(SETUPS):
        engine = Interrupted(folder, options, seed, known)
        outputs = engine.answer(PROMPTS, PARAMS)
        check(outputs, folder)
        preempted += engine.preempted
        assert engine.restarts == 1
        found.append([[answer.token_ids for answer in output.outputs] for output in outputs])
        known = [[*output.prompt_token_ids, *answer.token_ids] for output in outputs for answer in output.outputs]
    assert all(other == found[0] for other in found) and preempted
    return True
