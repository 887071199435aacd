"""Random lives of requests through the real core, scheduler and cache."""

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvern.engine.queues import POLICIES
from kvern.request.request import FinishReason
from tests.support.simulated_device import STOP_TOKEN, Setup
from tests.support.simulated_engine import SimulatedEngine

SWITCHES = list(itertools.product((True, False), repeat=4))


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    paged, prefix_cache, chunked, continuous = draw(st.sampled_from(SWITCHES))
    setup = Setup(
        paged=paged,
        prefix_cache=prefix_cache,
        chunked=chunked,
        continuous=continuous,
        policy=draw(st.sampled_from(sorted(POLICIES))),
        depth=draw(st.integers(1, 3)),
        block_size=draw(st.integers(1, 5)),
        max_model_len=draw(st.integers(8, 24)),
        spare_blocks=draw(st.integers(0, 6)),
        slots=draw(st.integers(1, 5)),
        spare_budget=draw(st.integers(0, 8)),
        aging_steps=draw(st.integers(1, 12)),
        adapter_places=draw(st.integers(1, 3)),
        tier_pages=draw(st.sampled_from((0, 3, 30))),
        page_blocks=draw(st.integers(1, 3)),
        tier_lies=draw(st.sampled_from((0.0, 0.2))),
        tier_delay=draw(st.integers(0, 3)),
        tier_faults=draw(st.integers(0, 3)),
        drafts=draw(st.sampled_from((0, 0, 1, 4))),
        on_device=draw(st.booleans()),
        step_rows=draw(st.sampled_from((0, 0, 1, 3, 6))),
        chunk=draw(st.sampled_from((0, 1, 2))),
    )
    setup = with_stages(setup, draw(st.sampled_from((1, 1, 1, 2, 3))))
    setup = with_states(setup, draw(st.sampled_from((None, None, 0, 1, 8))))
    windowed = draw(st.sampled_from((None, None, (1, 1), (3, 2), (9, 1))))
    return with_window(setup, windowed, draw(st.booleans()))


def with_stages(setup: Setup, stages: int) -> Setup:
    """A machine for a model of several stages, each of which computes a step; there are no drafts on their devices."""
    return setup if stages == 1 else replace(setup, stages=stages, depth=stages, on_device=False)


def with_states(setup: Setup, kept: int | None) -> Setup:
    """A machine for a model with recurrent states, some of which are kept."""
    return setup if kept is None else replace(setup, kept_states=kept)


def with_window(setup: Setup, windowed: tuple[int, int] | None, all_windowed: bool = False) -> Setup:
    """A machine for a model with windows and separate block tables."""
    if windowed is None or not setup.paged:
        return setup
    return replace(setup, windowed=windowed, all_windowed=all_windowed, kept_states=None)


SHARED = ([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2, 2, 2])


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Mostly a piece of what other prompts begin with, and something of its own."""
    shared = draw(st.sampled_from(SHARED))
    prompt = shared[: draw(st.integers(0, len(shared)))] + draw(st.lists(st.integers(0, STOP_TOKEN), max_size=5))
    return prompt or [0]


FAULTS = st.sampled_from((None, None, None, None, None, None, 1, 6, 12))


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, steps, failures, aborts, stops and evictions in any order."""

    @initialize(setup=setups())
    def start(self, setup: Setup) -> None:
        self.engine = SimulatedEngine(setup)

    @rule(
        prompt=prompts(),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from((1, 1, 1, 2, 4)),
        namespace=st.sampled_from((0, 0, 0, 1)),
        priority=st.integers(-1, 1),
        turn=st.sampled_from((0, 0, 1, 5)),
        owner=st.sampled_from("aaabc"),
        stop=st.booleans(),
        prompt_logprobs_from=st.sampled_from((None, None, None, 1, 4, 9)),
        adapter=st.sampled_from((None, None, 1, 2, 3)),
        fault=FAULTS,
        whole=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, **options: Any) -> None:
        prompt = prompt[: self.engine.setup.max_model_len - 1]
        self.engine.add(prompt, max_tokens, **options)

    @rule(
        prompt=prompts(),
        max_tokens=st.integers(1, 12),
        beams=st.integers(1, 5),
        n=st.integers(1, 5),
        length_penalty=st.sampled_from((1.0, 0.0, -1.0, 2.0)),
        early_stopping=st.sampled_from((False, True, "never")),
        namespace=st.sampled_from((0, 0, 0, 1)),
        priority=st.integers(-1, 1),
        owner=st.sampled_from("aaabc"),
        stop=st.booleans(),
        prompt_logprobs_from=st.sampled_from((None, None, None, 1, 4)),
        adapter=st.sampled_from((None, None, 1, 2, 3)),
        fault=FAULTS,
    )
    def search(self, prompt: list[int], max_tokens: int, beams: int, n: int, **options: Any) -> None:
        setup = self.engine.setup
        beams = min(beams, setup.limits.max_batch_requests)
        prompt = prompt[: setup.max_model_len - 1]
        self.engine.add(prompt, max_tokens, beams=beams, n=min(n, beams), **options)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.engine.alive)
    @rule(place=st.integers(0, 1000), reason=st.sampled_from(("abort", "stop")))
    def finish(self, place: int, reason: FinishReason) -> None:
        alive = self.engine.alive
        self.engine.finish(alive[place % len(alive)], reason)

    @precondition(lambda self: self.engine.alive)
    @rule(places=st.tuples(st.integers(0, 1000), st.integers(0, 1000)))
    def clash(self, places: tuple[int, int]) -> None:
        alive = self.engine.alive
        self.engine.clash(*(alive[place % len(alive)] for place in places))

    @rule(share=st.floats(0, 1))
    def resize(self, share: float) -> None:
        self.engine.resize(share)

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        before = self.engine.cache.available_count
        self.engine.cache.tree.evict(count)
        assert self.engine.cache.available_count == before
        self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run()


def random_life(setup: Setup, seed: int, arrivals: int = 40, faults: float = 0.1) -> SimulatedEngine:
    """Serve a random crowd to its end, of which the share `faults` lets a step fail."""
    dice, engine = random.Random(seed), SimulatedEngine(setup)
    while arrivals or engine.alive:
        if arrivals and dice.random() < 0.4:
            shared = dice.choice(SHARED)
            prompt = shared[: dice.randint(1, len(shared))] + [dice.randrange(4) for _ in range(dice.randint(0, 6))]
            beams = min(dice.choice((1, 2, 4)), setup.limits.max_batch_requests) if dice.random() < 0.3 else None
            engine.add(
                prompt[: setup.max_model_len - 1],
                dice.randint(1, 9),
                n=dice.choice((1, 1, 1, 3)) if beams is None else dice.randint(1, beams),
                beams=beams,
                namespace=dice.random() < 0.1,
                priority=dice.randint(-1, 1),
                owner=dice.choice("aaabc"),
                stop=dice.random() < 0.5,
                prompt_logprobs_from=dice.choice((None, None, None, None, 1, 1 + dice.randrange(12))),
                adapter=dice.choice((None, None, 1, 2, 3)),
                fault=dice.randint(1, 20) if dice.random() < faults else None,
            )
            arrivals -= 1
        if engine.alive and dice.random() < faults / 10:
            engine.clash(dice.choice(engine.alive), dice.choice(engine.alive))
        if setup.chunk and dice.random() < 0.1:
            engine.resize(dice.random())
        if engine.alive and dice.random() < 0.03:
            engine.finish(dice.choice(engine.alive))
        engine.step()
    engine.run()
    return engine


def consume(lives: Iterable[SimulatedEngine]) -> None:
    for _ in lives:
        pass


def random_setup(seed: int) -> Setup:
    """Any engine, small enough to run out of everything."""
    dice = random.Random(seed)
    setup = Setup(
        *dice.choice(SWITCHES),
        policy=dice.choice(sorted(POLICIES)),
        depth=dice.randint(1, 3),
        block_size=dice.randint(1, 5),
        max_model_len=dice.randint(14, 30),
        spare_blocks=dice.randint(0, 8),
        slots=dice.randint(1, 6),
        spare_budget=dice.randint(0, 12),
        aging_steps=dice.randint(1, 20),
        tier_pages=dice.choice((0, 3, 30)),
        page_blocks=dice.randint(1, 3),
        tier_lies=dice.choice((0.0, 0.2)),
        tier_delay=dice.randint(0, 3),
        tier_faults=dice.randint(0, 3),
        drafts=dice.choice((0, 0, 1, 4)),
        on_device=dice.random() < 0.5,
        step_rows=dice.choice((0, 0, 1, 3, 6)),
    )
    setup = with_states(setup, dice.choice((None, None, 0, 1, 8)))
    setup = with_window(setup, dice.choice((None, None, (1, 1), (3, 2), (9, 1))), dice.random() < 0.3)
    return replace(setup, chunk=dice.choice((0, 1, 2)))
