"""The rule of hits: where a request continues if a tier has only some parts of its pages."""

from dataclasses import replace

import pytest

from kvern.cache.messages import Part
from kvern.cache.radix import Node
from kvern.cache.states import StatePool
from kvern.cache.tier import TierTraffic
from kvern.request.request import State
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine

PROMPT = [place % 3 for place in range(33)]
SIZES = {"block_size": 2, "max_model_len": 48, "spare_blocks": 40, "spare_budget": 60, "tier_pages": 100}


def engine(all_windowed: bool = False, windowed: tuple[int, int] | None = (6, 2), states: int | None = None) -> Setup:
    return Setup(**SIZES, page_blocks=2, windowed=windowed, all_windowed=all_windowed, kept_states=states)  # type: ignore[arg-type]


def hit(found: SimulatedEngine, prompt: list[int] = PROMPT) -> int:
    """The tokens that a request finds, the prefix tree being as it is."""
    [request] = found.add(prompt, 2)
    found.run_requests()
    return request.answer.cached_tokens


def keys_of(found: SimulatedEngine) -> list[bytes]:
    """The content keys of the pages of a prompt that was computed."""
    tree = found.cache.tree
    nodes: list[Node] = tree.match(found.requests["0#0"].cache_namespace, PROMPT, len(PROMPT))[0]
    return [tree.key(node) for node in nodes[1::2]]


@pytest.mark.parametrize("all_windowed", [False, True])
@pytest.mark.parametrize(
    ("missing", "expected"),
    [((), 32), ((7,), 28), ((6,), 24), ((7, 5), 20), ((0, 1, 2, 3, 4, 5), 32), ((2, 3, 4, 5, 6, 7), 8)],
)
def test_a_hit_has_its_window(all_windowed: bool, missing: tuple[int, ...], expected: int) -> None:
    """The window of a query behind page 8 begins in page 6, of which it sees one block."""
    found = SimulatedEngine(engine(all_windowed))
    assert hit(found) == 0
    assert found.tier is not None
    for page in missing:
        del found.tier.pages[keys_of(found)[page], Part.WINDOWS]
    found.cache.tree.clear()
    before = found.tier.loaded
    assert hit(found) == expected
    pages = expected // 4
    windows = min(pages, 2)
    assert found.tier.loaded - before == windows + (0 if all_windowed else pages), "too much was loaded"


def test_windows_alone_are_loaded_where_the_tree_has_the_rest() -> None:
    found = SimulatedEngine(engine())
    assert hit(found) == 0
    windows = next(extension for extension in found.cache.extensions if extension.name == "windows")
    assert found.tier is not None
    while windows.evict(True):
        pass
    before = found.tier.loaded
    assert hit(found) == 32
    assert found.tier.loaded - before == 2


def test_windows_that_are_computed_again_are_saved_again() -> None:
    found = SimulatedEngine(engine())
    assert hit(found) == 0
    assert found.tier is not None
    windows = next(extension for extension in found.cache.extensions if extension.name == "windows")
    keys = keys_of(found)
    for page in range(8):
        del found.tier.pages[keys[page], Part.WINDOWS]
    while windows.evict(True):
        pass
    saved = found.tier.saved
    assert hit(found) == 0
    assert all((key, Part.WINDOWS) in found.tier.pages for key in keys)
    assert found.tier.saved == saved + 8, "blocks that are kept are saved again"


def test_states_are_found_at_ends_of_pages() -> None:
    """A conversation goes on behind the last page of the prompt before, or where another one began to differ."""
    found = SimulatedEngine(engine(windowed=None, states=6))
    assert hit(found) == 0
    other = [*PROMPT[:18], *[2] * 12]
    assert hit(found, other) == 0, "nothing has a state there"
    found.cache.tree.clear()
    assert hit(found, [*PROMPT, 1, 2, 0]) == 32
    found.cache.tree.clear()
    assert hit(found, [*PROMPT[:18], 1, 1]) == 16
    found.cache.tree.clear()
    assert hit(found, other) == 28
    assert found.tier is not None
    states = {name for name in found.tier.pages if name[1] is Part.STATE}
    assert len(states) == 3, "states are kept that nobody continues from"
    for name in states:
        del found.tier.pages[name]
    found.cache.tree.clear()
    assert hit(found) == 0, "blocks without a state are a hit"


def test_short_turns_of_a_conversation_leave_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn goes on from the state at the end of the one before, which no tier keeps, and adds few tokens."""
    setup = Setup(**SIZES | {"max_model_len": 96}, page_blocks=2, kept_states=6)  # type: ignore[arg-type]
    found = SimulatedEngine(setup)
    pool = found.cache.extension(StatePool)
    assert pool is not None
    monkeypatch.setattr(pool, "_apart", 12)
    talk = list(PROMPT)
    for turn in range(4):
        [request] = found.add(talk, 2)
        found.run_requests()
        assert request.answer.cached_tokens >= len(talk) - 8 or not turn
        talk = [*request.token_ids, *[turn % 3] * 5]
    found.cache.tree.clear()
    assert hit(found, talk) >= len(talk) - 24


def test_a_state_that_is_still_to_be_copied_is_not_loaded_over() -> None:
    """A copy that a step has not made yet would write over what was loaded, or take it for a prompt's state."""
    found = SimulatedEngine(engine(windowed=None, states=6))
    hit(found)
    states = found.cache.extension(StatePool)
    assert states is not None and states.kept and states._free
    states._copies = [(states._free[-1], states._free[0])]
    first = states.reserve()
    assert first not in states._copies[0]
    kept = states._kept[states.kept[0]].index
    states._copies += [(index, index) for index in states._free]
    assert states.reserve() == kept, "the node used longest ago gives its state"
    states._copies += [(entry.index, entry.index) for entry in states._kept.values()]
    assert not states.has_spare()


@pytest.mark.parametrize("all_windowed", [False, True])
def test_what_waits_to_be_saved_goes_with_memory_that_is_given_back(all_windowed: bool) -> None:
    found = SimulatedEngine(replace(engine(all_windowed), chunk=2))
    found.add(PROMPT, 2)
    traffic = found.cache.extension(TierTraffic)
    assert traffic is not None and found.tier is not None
    while not traffic._saves:
        found.step()
    waiting = [save.key for save in traffic._saves]
    [request] = found.requests.values()
    found.finish(request)
    found.core.resize_cache(1)
    found.run()
    assert found.cache.memory.chunks == 1
    kept = {key for key, _ in found.tier.pages}
    assert kept.isdisjoint(waiting[1:]), "the first chunk has two blocks, which is a page"
    while (memory := found.cache.memory).chunks < memory.most_chunks:
        found.core.resize_cache(memory.most_chunks)
    hit(found)
    found.run()
    assert kept < {key for key, _ in found.tier.pages} >= {*waiting[-1:]}, "it was computed again"


@pytest.mark.parametrize("all_windowed", [False, True])
def test_memory_that_a_load_holds_is_given_back_once_it_has_ended(all_windowed: bool) -> None:
    found = SimulatedEngine(replace(engine(all_windowed), chunk=2, tier_delay=3))
    assert hit(found) == 0
    found.cache.tree.clear()
    [request] = found.add(PROMPT, 2)
    while request.state is not State.LOADING:
        found.step()
    found.finish(request)
    assert found.core.resize_cache(1)[0] > 1, "a load writes to higher chunks"
    found.run()
    assert found.cache.memory.chunks == 1
