"""Pages that left the cache and come back: the bits that the prefix tree gives, and less to compute."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.cache.messages import PageLoad, PageSave, Part, TierMessage
from kvern.errors import ConfigError
from kvern.request.request import RequestOptions, State
from kvern.request.step import SchedulerOutput
from kvern.runner.tiered import TieredSteps, computing
from kvern.tiers.host import HostStore
from kvern.tiers.pages import HEADER_BYTES
from kvern.tiers.store import STORES
from tests.support.idle import core_here, is_idle
from tests.support.served import eventually
from tests.support.tiers import (
    GREEDY,
    HOST,
    PAGE_TOKENS,
    answer,
    check_hits,
    figures,
    forget,
    settle,
    tier_of,
    trust,
)

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "block_size": 4,
    "max_model_len": 64,
    "kv_cache_tokens": 120,
    "max_batch_requests": 2,
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [*range(20, 61)]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PAGE_TOKENS, 8)


def tokens(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    return [output.outputs[0].token_ids for output in llm.generate([list(prompt) for prompt in prompts], PARAMS)]


@pytest.mark.parametrize("by_heads", [False, True])
def test_a_hit_gives_the_bits_of_the_prefix_tree(tiny_model: Path, by_heads: bool) -> None:
    with LLM(tiny_model, kv_tier=HOST, kv_tier_heads=by_heads, **OPTIONS) as llm:
        assert check_hits(llm, PROMPT) == 40


class Calls(list[str]):
    """A tier that notes what it is asked for."""

    def save(self, saves: object) -> None:
        self.append("packed")

    def put(self) -> None:
        self.append("put")


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_started_before_the_host_copies_what_was_packed(fails: bool) -> None:
    """Also if it fails: what was packed was written by the steps before."""
    calls: Any = Calls()

    def execute(output: SchedulerOutput) -> Any:
        calls.append("started")
        if fails:
            raise RuntimeError("as planned")

    steps = TieredSteps(execute, calls)
    output = SchedulerOutput(1)
    output.extensions[TierMessage.extension] = TierMessage([PageSave(b"key", [[0]])], [], [])
    with pytest.raises(RuntimeError, match="as planned") if fails else nullcontext():
        steps.execute(output)
    assert calls == ["packed", "started", "put"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_that_ends_while_a_step_computes_is_reported_with_it(ranks: int) -> None:
    """With several ranks one step later, since all of them say so at the beginning of a step."""
    ended: list[tuple[int, int]] = []
    tier: Any = Calls()
    tier.load, tier.finished = lambda loads: None, lambda: [ended.pop()] if ended else []
    steps = TieredSteps(computing(lambda _: Future()), tier, None if ranks == 1 else lambda counts: counts)
    outputs = [SchedulerOutput(number) for number in (1, 2)]
    outputs[0].extensions[TierMessage.extension] = TierMessage([], [PageLoad(7, b"key", [[0]])], [])
    first = steps.execute(outputs[0])
    ended.append((7, 1))
    reports = [first.result().reports, steps.execute(outputs[1]).result().reports]
    assert [report[TierMessage.extension] for report in reports] == [[(7, 1)] if ranks == 1 else [], [(7, 1)]]


def test_conversations_that_left_the_cache_go_on(tiny_model: Path) -> None:
    """Each turn evicts the blocks of all other conversations."""
    plain = LLM(tiny_model, **OPTIONS)
    tiered = LLM(tiny_model, kv_tier=HOST, **OPTIONS)
    trust(tiered)
    talks = [list(range(20 + 40 * talk, 50 + 40 * talk)) for talk in range(4)]
    for turn in range(3):
        expected = tokens(plain, talks)
        settle(tiered)
        outputs = tiered.generate(talks, PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        if turn:
            computed = [len(talk) - output.cached_tokens for talk, output in zip(talks, outputs, strict=True)]
            assert max(computed) <= 15, "what was said before was computed again"
        for talk, output in zip(talks, outputs, strict=True):
            talk += [*output.outputs[0].token_ids, 7]
    settle(tiered)
    assert figures(tiered).hit_tokens and is_idle(tiered)


def test_a_page_of_which_the_tree_has_a_part_brings_the_rest(tiny_model: Path) -> None:
    with LLM(tiny_model, kv_tier=HOST, **OPTIONS) as llm:
        trust(llm)
        expected, _ = answer(llm, PROMPT)
        settle(llm)
        tree = core_here(llm).scheduler.cache.tree
        tree.evict(tree.size - 3)  # a page and a half
        found, cached = answer(llm, PROMPT)
        assert cached == 40
        assert found.token_ids == expected.token_ids
        assert figures(llm).hit_tokens == 32


def test_answers_say_where_their_prompts_were(tiny_model: Path, tmp_path: Path) -> None:
    """On the device, and in each store; of several samples what was loaded for the first."""
    tiers = (*HOST, f"disk:{tmp_path}/pages:1GB")
    with LLM(tiny_model, kv_tier=tiers, **OPTIONS) as llm:
        trust(llm)
        first = llm.generate([PROMPT], PARAMS)[0]
        assert first.cached_tokens_details == {"device": 0, "host": 0, "disk": 0}
        settle(llm)
        tree = core_here(llm).scheduler.cache.tree
        tree.evict(tree.size - 3)
        host: Any = tier_of(llm).shelf.stores[0].store
        host.drop([*host._pages][2:])
        output = llm.generate([PROMPT], PARAMS)[0]
        assert output.loaded_tokens == {"host": 4, "disk": 24}
        assert output.cached_tokens_details == {"device": 12, "host": 4, "disk": 24}
        forget(llm)
        samples = llm.generate([PROMPT], SamplingParams(n=2, max_tokens=2, ignore_eos=True))[0]
        assert samples.loaded_tokens == {"host": 40, "disk": 0}
        assert sum(samples.cached_tokens_details.values()) == samples.cached_tokens
        forget(llm)
        search = llm.generate([PROMPT], SamplingParams(beam_width=2, max_tokens=2))[0]
        assert search.cached_tokens_details == {"device": 0, "host": 40, "disk": 0}
    with LLM(tiny_model, **OPTIONS) as llm:
        assert llm.generate([PROMPT], PARAMS)[0].cached_tokens_details == {}


def test_pages_come_while_a_request_waits_for_others(tiny_model: Path) -> None:
    options = OPTIONS | {"max_batch_requests": 1, "kv_cache_tokens": 240}
    with LLM(tiny_model, kv_tier=HOST, **options) as llm:
        trust(llm)
        expected, _ = answer(llm, PROMPT)
        forget(llm)
        engine: Any = llm._engine
        longer = engine.add("longer", [*range(100, 108)], SamplingParams(max_tokens=40, ignore_eos=True))
        waits = engine.add("waits", PROMPT, GREEDY)
        request = next(one for one in core_here(llm).scheduler.waiting if one.unit == "waits")
        while request.state is not State.LOADING:
            engine.step()
        eventually(lambda: figures(llm).hit_tokens == 40)
        while request.state is State.LOADING:
            engine.step()
        assert not longer.finished and request.state is State.WAITING
        while not waits.finished:
            engine.step()
        assert waits.cached_tokens_details == {"device": 0, "host": 40}
        assert waits.outputs[0].token_ids == expected.token_ids
        settle(llm)
        assert is_idle(llm)


def test_a_slow_load_pays_if_the_queue_takes_as_long(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_model, kv_tier=HOST, **OPTIONS) as llm:
        tier = tier_of(llm)
        tier.computing = lambda start, end: (end - start) / 1000
        monkeypatch.setattr(tier.shelf, "seconds", lambda sizes: 0.06)
        pages = [("host", Part.BLOCKS)]
        assert not tier.pays(pages, 0, 40)
        assert figures(llm).refused_tokens == 40
        assert not tier.pays(pages, 0, 40, [(0, 8), (60, 64)], is_next=False)
        assert tier.pays(pages, 0, 40, [(0, 8), (44, 60)], is_next=False)
        assert figures(llm).refused_tokens == 40, "it is not refused before it is the next to run"
        assert len(tier.shelf._promised) == 1, "those behind it wait for it"


def test_keys_of_an_api_share_no_pages(tiny_model: Path) -> None:
    with LLM(tiny_model, kv_tier=HOST, **OPTIONS) as llm:
        trust(llm)
        engine: Any = llm._engine

        def cached(namespace: bytes) -> int:
            output = engine.add("asked", PROMPT, GREEDY, RequestOptions(namespace=namespace))
            while not output.finished:
                engine.step()
            forget(llm)
            return int(output.cached_tokens)

        assert [cached(name) for name in (b"one", b"two", b"one", b"", b"two")] == [0, 0, 40, 0, 40]


def test_what_changes_keys_and_values_changes_all_names(tiny_model: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
        {"block_size": 8},
        {"quantization": "int8"},
        {"deterministic": True},
        {"hf_overrides": {"rope_theta": 5000.0}},
    ]
    found = set()
    for change in changes:
        with LLM(tiny_model, kv_tier=HOST, **OPTIONS | change) as llm:
            found.add(tier_of(llm).identity)
    assert len(found) == len(changes)


def test_a_store_that_forgets_changes_no_answer(tiny_model: Path) -> None:
    plain = LLM(tiny_model, **OPTIONS)
    tiered = LLM(tiny_model, kv_tier=("host:40KB",), **OPTIONS)
    trust(tiered)
    prompts = [[*range(20, 36), number, *range(number, number + 12)] for number in range(60, 66)] * 2
    for _ in range(3):
        assert tokens(tiered, prompts) == tokens(plain, prompts)
        settle(tiered)
    assert figures(tiered).evicted_pages and is_idle(tiered)


def test_preempted_requests_come_back_by_loading(tiny_model: Path) -> None:
    options = OPTIONS | {"kv_cache_tokens": 68, "max_batch_requests": 3}
    params = PARAMS.replace(max_tokens=20)
    prompts = [[*range(20 + 40 * number, 50 + 40 * number)] for number in range(3)]
    with LLM(tiny_model, **OPTIONS) as plain:
        expected = [plain.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    with LLM(tiny_model, kv_tier=HOST, **options) as llm:
        tier, engine = trust(llm), llm._engine
        outputs = [engine.add(str(number), prompt, params) for number, prompt in enumerate(prompts)]
        while engine.has_work:
            engine.step()
            eventually(lambda: tier.shelf.is_quiet)  # steps of a fast processor would be over before
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.statistics().preemptions and figures(llm).hit_tokens
        settle(llm)
        assert is_idle(llm)


def test_what_computes_faster_is_not_loaded(tiny_model: Path) -> None:
    with LLM(tiny_model, kv_tier=HOST, **OPTIONS) as llm:
        tier = trust(llm)
        expected, _ = answer(llm, PROMPT)
        forget(llm)
        tier.computing = lambda start, end: 0.0
        found, cached = answer(llm, PROMPT)
        assert (cached, found.token_ids) == (0, expected.token_ids)
        assert figures(llm).refused_tokens == 40 and not figures(llm).read_bytes
        forget(llm)
        tier.computing = lambda start, end: 10.0
        assert answer(llm, PROMPT)[1] == 40


def test_namespaces_hold(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one client's salt has saved, another's does not find."""
    with LLM(tiny_model, kv_tier=HOST, **OPTIONS) as llm:
        trust(llm)
        for salt, hits in ((b"a", 0), (b"b", 0), (b"a", 40)):
            monkeypatch.setattr("kvern.engine.core.cache_namespace", lambda spec, digest, salt=salt: salt)
            assert answer(llm, PROMPT)[1] == hits
            forget(llm)
        assert figures(llm).hit_tokens == 40


def spoil(llm: LLM, change: Any) -> None:
    """Change the bytes of each page in host memory."""
    store = tier_of(llm).shelf.stores[0].store
    assert isinstance(store, HostStore)
    for page in store._pages.values():
        change(store, page)


def flip(place: int) -> Any:
    def change(store: HostStore, page: Any) -> None:
        store._part(page.cells[place // store._cell], store._cell)[place % store._cell] ^= 16

    return change


@pytest.mark.parametrize("place", [0, 5, 10, 20, 40, HEADER_BYTES, HEADER_BYTES + 777])
def test_a_flipped_bit_is_a_miss(tiny_model: Path, place: int) -> None:
    with LLM(tiny_model, kv_tier=HOST, **OPTIONS) as llm:
        trust(llm)
        expected, _ = answer(llm, PROMPT)
        forget(llm)
        spoil(llm, flip(place))
        found, cached = answer(llm, PROMPT)
        assert (cached, found.token_ids) == (0, expected.token_ids)
        assert figures(llm).corrupt_pages
        forget(llm)
        assert answer(llm, PROMPT)[1] == 40, "the pages are not written again"


def test_swapped_pages_are_misses(tiny_model: Path) -> None:
    with LLM(tiny_model, kv_tier=HOST, **OPTIONS) as llm:
        trust(llm)
        expected, _ = answer(llm, PROMPT)
        forget(llm)
        store: Any = tier_of(llm).shelf.stores[0].store
        pages = [page.cells for page in store._pages.values()]
        for page, cells in zip(store._pages.values(), pages[1:] + pages[:1], strict=True):
            page.cells = cells
        found, cached = answer(llm, PROMPT)
        assert (cached, found.token_ids) == (0, expected.token_ids)
        assert figures(llm).corrupt_pages


def test_a_tier_without_the_prefix_cache_is_refused(tiny_model: Path) -> None:
    """Such a tier would never be asked for a page."""
    with pytest.raises(ConfigError, match="kv_tier host:1GB needs the prefix cache"):
        LLM(tiny_model, kv_tier="host:1GB", **OPTIONS | {"prefix_cache": False})


@pytest.mark.parametrize("asked", [{"swap_space": 1}, {"kv_tier": "host:1GiB?optional"}])
def test_an_optional_tier_is_left_out_where_there_can_be_none(
    asked: dict[str, Any], tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(tiny_model, **asked, **OPTIONS | {"prefix_cache": False}) as llm:
        assert llm.generate([PROMPT], PARAMS)[0].cached_tokens_details == {}
    assert "kv_tier host:1GiB has no effect: the prefix cache is off" in caplog.text


def test_an_optional_tier_is_a_tier(tiny_model: Path) -> None:
    with LLM(tiny_model, swap_space=1, **OPTIONS) as llm:
        assert check_hits(llm, PROMPT) == 40


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("host:much", "the size 'much' must be"),
        ("host:100", "give it 1[0-9]+ at least"),
        ("hots:1GB", "did you mean host"),
    ],
)
def test_a_wrong_option_is_named(tiny_model: Path, option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_model, kv_tier=(option,), **OPTIONS)


def test_a_store_is_a_registration(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a package, or of a test."""
    monkeypatch.setattr(STORES, "_registered", dict(STORES._registered))
    STORES.register("memory")(lambda rest, identity: HostStore(int(rest)))
    with LLM(tiny_model, kv_tier=("memory:20000000",), **OPTIONS) as llm:
        assert check_hits(llm, PROMPT) == 40
