"""Who attends in each phase is measured at start, PyTorch's attention beside kvern's kernels on cards without tiles."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.attention import selection
from kvern.attention.base import PlannedAttention
from kvern.attention.gathered import GatheredKernels, _attend
from kvern.attention.selection import AttentionChoice, Shapes, choose, make_queries, reference_attention
from kvern.attention.triton import cached_layer
from kvern.config import EngineConfig
from kvern.device.device_batch import Queries
from kvern.device.measurements import Measurements
from kvern.spec.mixers import AttentionSpec
from tests.support.families import make_checkpoint
from tests.support.kernels.device_engines import OPTIONS
from tests.support.outputs import token_ids

PLAIN = AttentionSpec(heads=4, kv_heads=2, head_dim=16, scale=0.25)
EQUAL = AttentionSpec(heads=2, kv_heads=2, head_dim=16, scale=0.3)
NEW = [(0, 7), (0, 1), (0, 12), (0, 64)]
FREE = 1 << 30
PROMPT = [[5, 9, 17, 33, 2, 81]]
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def shapes_of(*layers: AttentionSpec) -> Shapes:
    return Shapes(layers, 4, torch.float32, torch.float32, torch.device("cpu"), 4, 64)


class Recorder:
    """Stands in for kvern's kernels, and notes what they are asked to plan."""

    name = "own"
    captures = True
    max_requests = 4
    prefix_members = 0
    tile_sizes: frozenset[int] = frozenset()
    expanding = None

    def __init__(self) -> None:
        self.planned: list[str] = []

    def decode(self, queries: Queries) -> PlannedAttention:
        return self._plan("decode")

    def prefill(self, queries: Queries) -> PlannedAttention:
        return self._plan("prefill")

    def _plan(self, what: str) -> PlannedAttention:
        self.planned.append(what)
        return lambda layer, query, cached, out: None


@pytest.mark.parametrize("layer", [PLAIN, EQUAL], ids=["grouped", "equal"])
def test_new_prompts_are_gathered_and_answered_as_by_the_reference(layer: AttentionSpec) -> None:
    own = Recorder()
    queries, query, cache = make_queries(NEW, shapes_of(layer), layer)
    out = torch.full_like(query, float("nan"))
    GatheredKernels([layer], own).prefill(queries)(0, query, cached_layer(layer, cache), out)
    torch.testing.assert_close(out, reference_attention(queries, query, cache, layer), rtol=1e-5, atol=1e-5)
    assert not own.planned


def test_steps_with_a_context_go_to_own_kernels() -> None:
    own = Recorder()
    queries, _, _ = make_queries([(0, 7), (13, 5)], shapes_of(PLAIN), PLAIN)
    GatheredKernels([PLAIN], own).prefill(queries)
    queries, _, _ = make_queries([(0, 1)], shapes_of(PLAIN), PLAIN)
    GatheredKernels([PLAIN], own).decode(queries)
    assert own.planned == ["prefill", "decode"]


def test_scores_of_all_pairs_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def attend(query: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        asked.append((torch.backends.cuda.math_sdp_enabled(), options["is_causal"]))
        return query

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attend)
    queries, query, cache = make_queries(NEW, shapes_of(PLAIN), PLAIN)
    run = GatheredKernels([PLAIN], Recorder()).prefill(queries)
    run(0, query, cached_layer(PLAIN, cache), torch.empty_like(query))
    assert asked == [(False, True)] * len(NEW)
    assert torch.backends.cuda.math_sdp_enabled()


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., AttentionChoice]:
    """Chooses on a card of an architecture, where launches take so many microseconds, by a part of their name.

    Those that take None find no memory.
    """
    monkeypatch.setattr(selection, "PACKAGES", {})

    def on(
        card: int | str, times: Mapping[str, float | None], layer: AttentionSpec = PLAIN, **options: Any
    ) -> AttentionChoice:
        def timed(launch: Any) -> float:
            time = next(time for name, time in times.items() if name in launch.func.__qualname__)
            if time is None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return 1e-6 * time

        monkeypatch.setattr(selection, "architecture", lambda device: card)
        monkeypatch.setattr(selection, "time_launches", timed)
        measurements = Measurements(tmp_path, torch.device("cpu"))
        found = choose("auto", EngineConfig(model="none", **options), shapes_of(layer), measurements, FREE)
        measurements.save()
        return found

    return on


SLOW_TRITON = {"Triton": 30.0, "SplitPrefill": 30.0, "Gathered": 20.0}
FAST_TRITON = {"Triton": 10.0, "SplitPrefill": 10.0, "Gathered": 20.0}


@pytest.mark.parametrize("card", ["gfx942", 80])
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "no graphs"])
def test_the_faster_attends_to_prompts_and_the_table_says_so(
    card: int | str, cuda_graphs: bool, chosen: Callable[..., AttentionChoice]
) -> None:
    found = chosen(card, SLOW_TRITON, cuda_graphs=cuda_graphs)
    assert found.phases.pop("decode") == "triton"
    assert set(found.phases.values()) == {"torch"}
    head, *lines = found.table
    assert head.split() == ["attention,", "us", "a", "layer", "triton", "torch", "chosen"]
    assert lines[0].split() == ["prefill,", "short", "30.0", "20.0", "torch"]
    assert not any("decode" in line for line in lines), "there is no choice, and nothing is timed"


def test_a_library_that_cannot_be_captured_is_timed_at_decodes_without_graphs_alone() -> None:
    library = Recorder()
    library.captures = False
    candidates = {"triton": Recorder(), "flashinfer": library, "torch": GatheredKernels([PLAIN], Recorder())}
    assert selection._able(candidates, cuda_graphs=True)["decode"] == ["triton"]
    able = selection._able(candidates, cuda_graphs=False)
    assert able["decode"] == ["triton", "flashinfer"]
    assert able["mixed"] == ["triton", "flashinfer", "torch"]
    table = selection._table(
        {"triton": {"decode, short": 2e-6}, "flashinfer": {"decode, short": 1e-6}, "torch": {}},
        {"decode": "flashinfer"},
    )
    assert table[1].split() == ["decode,", "short", "2.0", "1.0", "-", "flashinfer"]


@pytest.mark.parametrize("full", ["Triton", "Gathered"])
def test_without_memory_to_time_own_kernels_attend_until_there_is(
    full: str, chosen: Callable[..., AttentionChoice], caplog: pytest.LogCaptureFixture
) -> None:
    found = chosen("gfx942", {**SLOW_TRITON, full: None})
    assert set(found.phases.values()) == {"triton"}
    assert set(found.libraries) == {"triton"} and not found.table
    assert "1.1 GB of free GPU memory are too little to time who attends" in caplog.text
    assert "torch" in chosen("gfx942", SLOW_TRITON).phases.values(), "nothing is remembered"


def test_timed_steps_are_as_large_as_the_free_memory_lets_them() -> None:
    shapes = Shapes([PLAIN], 16, torch.bfloat16, torch.bfloat16, torch.device("cpu"), 64, 9000)
    whole = [(8191, 1)] * 64
    one = 2 * (2 * 8192 * 2 + 2 * 4) * 16
    assert selection._fitting(whole, shapes, PLAIN, 64 * one) == whole
    assert selection._fitting(whole, shapes, PLAIN, 10 * one) == whole[:10]
    assert selection._fitting(whole, shapes, PLAIN, 0) == whole[:1]
    contiguous = replace(shapes, block_size=9000)
    assert len(selection._fitting([(511, 1)] * 64, contiguous, PLAIN, 10 * one)) == 9, "a sequence has a block"
    assert selection._fitting([(8191, 1)], replace(shapes, longest=100), PLAIN, one) == [(99, 1)]


def test_a_choice_is_remembered(chosen: Callable[..., AttentionChoice]) -> None:
    assert set(chosen("gfx942", FAST_TRITON).phases.values()) == {"triton"}
    again = chosen("gfx942", SLOW_TRITON)
    assert set(again.phases.values()) == {"triton"} and not again.table


@pytest.mark.parametrize(
    ("card", "layer", "options"),
    [
        (90, PLAIN, {}),
        (0, PLAIN, {}),
        ("gfx942", PLAIN, {"deterministic": True}),
        ("gfx942", AttentionSpec(heads=2, kv_heads=2, head_dim=16, scale=0.3, softcap=5.0), {}),
        ("gfx942", AttentionSpec(heads=2, kv_heads=2, head_dim=16, scale=0.3, sinks=True), {}),
        ("gfx942", AttentionSpec(heads=2, kv_heads=2, head_dim=16, scale=0.3, window=9), {}),
    ],
    ids=["Hopper", "interpreted", "deterministic", "softcap", "sinks", "window"],
)
def test_nothing_is_timed_where_there_is_no_choice(
    card: int | str, layer: AttentionSpec, options: dict[str, Any], chosen: Callable[..., AttentionChoice]
) -> None:
    found = chosen(card, {}, layer, **options)
    assert set(found.phases.values()) == {"triton"} and not found.table


def test_an_engine_takes_it_for_a_new_prompt_and_not_behind_a_prefix(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    expected = LLM(str(tmp_path), device="cpu", **OPTIONS).generate(PROMPT, GREEDY)
    attended = []

    def attend(*given: Any) -> None:
        attended.append(len(given[1]))
        _attend(*given)

    monkeypatch.setattr("kvern.attention.gathered._attend", attend)
    monkeypatch.setattr(selection, "PACKAGES", {})
    monkeypatch.setattr(selection, "architecture", lambda device: "gfx942")
    monkeypatch.setattr(selection, "time_launches", lambda launch: float("Gathered" not in str(launch)))
    llm = on_device(tmp_path, **OPTIONS | {"cache_dir": str(tmp_path / "cache")})
    attended.clear()
    for _ in range(2):
        assert token_ids(llm.generate(PROMPT, GREEDY)) == token_ids(expected)
    assert attended == [6], "in the first layer: of the last the sampled token alone is computed"
