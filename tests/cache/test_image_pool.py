"""Whatever happens to requests, each token of an image reads its row, and nothing is lost or waits for ever."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.cache import images
from kvern.cache.images import ImagePool
from kvern.request.request import Request
from tests.support.sampling import examples
from tests.support.simulated_images import PARTS, ImageEngine, ImageSetup

PIECES = ([0, 1, 2], [1, 1], [2, 0, 0, 1], [0], [2, 2, 3])
"""Tokens of images, of which the last cannot be decoded."""


def prompt_of(dice: random.Random, most: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Some images with texts between them, which other prompts may have, too."""
    prompt: list[int] = [0] * dice.randint(0, 3)
    places = []
    for _ in range(dice.randint(0, 3)):
        piece = dice.choices(PIECES, (4, 4, 4, 4, 1))[0]
        if len(prompt) + len(piece) < most:
            places.append((len(prompt), len(prompt) + len(piece) - 1))
            prompt += piece
        prompt += [1] * dice.randint(0, 2)
    return prompt[:most] or [0], places


def life(setup: ImageSetup, seed: int, requests: int = 12) -> ImageEngine:
    """Requests come, fork, are aborted and fail; the engine checks every step."""
    engine, dice = ImageEngine(setup), random.Random(seed)
    for _ in range(requests):
        prompt, places = prompt_of(dice, setup.max_model_len - 4)
        options: dict[str, Any] = dice.choice(({}, {}, {"n": 2}, {"beams": 2}, {"fault": dice.randint(1, 12)}))
        if options.get("beams", 0) <= setup.limits.max_batch_requests and options.get("n", 0) <= setup.slots:
            engine.see(prompt, places, dice.randint(1, 4), priority=dice.randint(-1, 1), **options)
        for _ in range(dice.randint(0, 6)):
            engine.step()
        if engine.alive and dice.random() < 0.3:
            engine.finish(dice.choice(engine.alive))
    engine.run()
    assert not engine.images._pending and not any(image.wanted for image in engine.images._images.values())
    return engine


@st.composite
def setups(draw: st.DrawFn) -> ImageSetup:
    chunked = draw(st.booleans())
    return ImageSetup(
        prefix_cache=draw(st.booleans()),
        chunked=chunked,
        continuous=draw(st.booleans()),
        policy=draw(st.sampled_from(("fcfs", "priority", "sjf"))),
        depth=draw(st.integers(1, 3)),
        block_size=draw(st.integers(1, 5)),
        max_model_len=24,
        spare_blocks=draw(st.integers(0, 6)),
        slots=draw(st.integers(2, 5)),
        spare_budget=draw(st.integers(0, 8)),
        drafts=draw(st.sampled_from((0, 0, 2))),
        step_rows=draw(st.sampled_from((0, 0, 3))),
        places=draw(st.integers(4, 12)) if chunked else 24,
        kept_states=draw(st.sampled_from((None, None, 1, 8))),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=examples(60), deadline=None)
@given(setups(), st.integers(0, 10_000))
def test_random_lives(setup: ImageSetup, seed: int) -> None:
    life(setup, seed)


def test_lives_meet_what_they_are_to_meet() -> None:
    """Otherwise the test above would test nothing."""
    engines = [life(ImageSetup(places=5, depth=2, spare_blocks=0, seed=seed), seed) for seed in range(8)]
    assert sum(engine.device.read for engine in engines) > 100
    assert sum(engine.refused for engine in engines) and sum(engine.device.failed_steps for engine in engines)
    assert sum(engine.core.statistics().preemptions for engine in engines)
    counted = [engine.core.statistics() for engine in engines]
    assert sum(one.image_rows_hit for one in counted) and sum(one.encoded_images for one in counted)
    assert all(one.decoded_images >= one.encoded_images for one in counted)


def eager(pool: ImagePool, request: Request, tokens: int) -> int:
    return tokens


def hasty(pool: ImagePool, request: Request, computed: int) -> bool:
    return False


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (images._Image, "is_pinned", property(lambda image: False)),
        (ImagePool, "until", eager),
        (ImagePool, "placed", lambda pool, request: None),
    ],
    ids=["no pins", "no wait within a prompt", "not told who runs"],
)
def test_mistakes_are_noticed(where: type, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises((AssertionError, KeyError)):
        _ = [life(ImageSetup(places=5, seed=seed), seed) for seed in range(40)]


def until_idle(engine: ImageEngine) -> None:
    while engine.core.has_work:
        engine.step()


def test_images_in_cached_prompts_are_neither_decoded_nor_encoded() -> None:
    engine = ImageEngine(ImageSetup(places=8, max_model_len=40, block_size=2))
    for _ in range(3):
        engine.see([0, *PIECES[2], 1, 1, 1], [(1, 4)], 2)
        until_idle(engine)
    counted = engine.core.statistics()
    assert (counted.decoded_images, counted.encoded_images, engine.images.hit_rows) == (1, 1, 0)
    engine.see([1, *PIECES[2], 1], [(1, 4)], 2)  # behind another token it is computed again, from the same rows
    until_idle(engine)
    assert (engine.core.statistics().encoded_images, engine.images.hit_rows) == (1, len(PIECES[2]))


def test_parts_of_an_image_are_computed_beside_decodes() -> None:
    engine = ImageEngine(ImageSetup(places=16, max_model_len=40, slots=2, spare_budget=0, seed=3))
    (talking,) = engine.add([1], 30)
    engine.step()
    engine.see([0, *[2] * 9, 1], [(1, 9)], 1)
    spoken = []
    while not engine.images.encoded:
        before = sum(image.parts for image in engine.images._images.values())
        engine.step()
        if sum(image.parts for image in engine.images._images.values()) > before:
            spoken.append(talking.output_length)
    assert len(set(spoken)) == PARTS + 9 % 3, "a part a step, and a token in each"
    engine.run()
