"""Layers with a window give their blocks back: the same answers from less memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.attention import compiled, torch_sdpa
from kvern.attention.groups import group_layers
from kvern.attention.memory import zero_caches
from kvern.config import EngineConfig
from kvern.models.implementation import describe_model
from kvern.models.loader import read_config
from kvern.runner.memory import choose_groups, report_groups
from kvern.runner.plan import ProbedDevice, agree
from kvern.runner.runner import ModelRunner
from kvern.spec.mixers import AttentionSpec
from tests.support.families import make_checkpoint, prompts_with_windows
from tests.support.internals import check_integrity
from tests.support.spoiled_blocks import spoiled_engine

NIGHTLY = ("mixtral", "phi3", "gemma2", "gpt_oss", "cohere2", "olmo3", "exaone4", "ministral")
FAMILIES = [
    "gemma3",
    "gemma4",
    "gemma4_vision",
    *(pytest.param(family, marks=pytest.mark.nightly) for family in NIGHTLY),
]
WINDOWS_ONLY = ("mixtral", "phi3")
"""Families whose layers all have a window: they need less memory, so requests are preempted in less."""
LENGTH = 120


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def engine(folder: Path, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"block_size": 4, "max_model_len": LENGTH, "kv_cache_tokens": 480, "max_batch_tokens": 12}
    return LLM(str(folder), **sizes | {"max_batch_requests": 4, "threads": 1, "dtype": "float32"} | options)


def answers(llm: LLM, params: SamplingParams) -> list[Any]:
    return [
        [(answer.token_ids, answer.cumulative_logprob) for answer in output.outputs]
        for output in llm.generate(prompts_with_windows(), params)
    ]


def check(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for (tokens, logprob), (wanted, other) in zip(ours, theirs, strict=True):
            assert tokens == wanted
            assert logprob == pytest.approx(other, abs=1e-3)


SMALL: dict[str, Any] = {"kv_cache_tokens": 90, "max_batch_requests": 10}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"prefix_cache": False, "chunked_prefill": False},
    SMALL,
    SMALL | {"cpu_kernels": False},
)


@pytest.mark.sample(1)
def test_answers_are_those_of_one_table(folder: Path) -> None:
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    search = SamplingParams(beam_width=3, n=2, max_tokens=6, logprobs=1)
    several = SamplingParams(n=3, seed=4, max_tokens=10, ignore_eos=True, logprobs=1)
    with engine(folder, windowed_kv_cache="off", kv_cache_tokens=1000) as llm:
        expected = [answers(llm, params) for params in (plain, search, several)]
    for options in SETTINGS:
        if "kv_cache_tokens" in options and read_config(folder)["model_type"] in WINDOWS_ONLY:
            options = options | {"kv_cache_tokens": 60}
        with engine(folder, **options) as llm:
            for _ in range(2):
                check(answers(llm, plain), expected[0])
            check(answers(llm, search), expected[1])
            check(answers(llm, several), expected[2])
            found = llm.statistics()
            check_integrity(llm)
        assert (found.preemptions > 0) == ("kv_cache_tokens" in options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["gemma3", pytest.param("gemma4", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("options", [SMALL, SMALL | {"cpu_kernels": False}], ids=["compiled", "PyTorch"])
def test_what_others_left_in_blocks_changes_nothing(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(family, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, n=2, ignore_eos=True, logprobs=0)
    expected = answers(engine(folder, **options), params)
    backends = [compiled, torch_sdpa]
    llm, spoiled = spoiled_engine(monkeypatch, lambda: engine(folder, **options), ModelRunner, backends)
    check(answers(llm, params), expected)
    assert spoiled


def layers(
    count: int, whole: Callable[[int], bool], window: int, kv_heads: int = 8, whole_width: int = 512
) -> list[AttentionSpec]:
    return [
        AttentionSpec(8, 1, whole_width, 1.0) if whole(index) else AttentionSpec(8, kv_heads, 64, 1.0, window)
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("specs", "places", "windows"),
    [
        (layers(62, lambda index: index % 6 == 5, 1024), 10, (6, 1, 1)),
        (layers(24, lambda index: index % 2 == 1, 128), 12, (1, 1, 1)),
        (layers(60, lambda index: index % 6 == 5, 1024, 16), 5, (10, 1, 2)),
        (layers(30, lambda index: index % 6 == 5, 1024, 16), 3, (9, 1, 2)),
        (layers(24, lambda index: index % 6 == 5, 512, 4), 4, (3, 2, 1)),
    ],
    ids=["gemma-3-27b", "gpt-oss-20b", "gemma-4-31b", "without a window half as wide", "with a window half as wide"],
)
def test_layers_divide_into_tables(specs: list[AttentionSpec], places: int, windows: tuple[int, ...]) -> None:
    groups = group_layers(specs)
    assert (len(groups.owners), groups.windows) == (places, windows)
    assert groups.window == max(layer.window or 0 for layer in specs)
    held = set(zip(groups.tables, groups.places, groups.parts, strict=True))
    assert len(held) == len(specs), "two layers in one place"


def test_layers_that_all_have_a_window_share_one_table_of_their_own() -> None:
    groups = group_layers(layers(32, lambda index: False, 4096))
    assert set(groups.tables) == {1} and groups.windows == (1, 1, 1) and not groups.whole
    assert list(groups.places) == list(groups.owners) == list(range(32))


@pytest.mark.parametrize("kv_heads", [2, 8, 16])
def test_no_two_layers_have_the_same_memory_of_a_block(kv_heads: int) -> None:
    specs, blocks, size = layers(7, lambda index: index % 3 == 2, 9, kv_heads), 7, 4
    groups = group_layers(specs)
    pools, caches = zero_caches(specs, groups, blocks, size, torch.float32)
    assert sum(pool.nbytes for pool in pools) == sum(
        specs[owner].stored * specs[owner].width * 4 * blocks * size for owner in groups.owners
    )
    free = iter(range(blocks))
    blocks_of = {table: next(free) for table in sorted(set(groups.tables))}
    for mark, (layer, table, cache) in enumerate(zip(specs, groups.tables, caches, strict=True), 1):
        cache[:, blocks_of[table] * (cache.shape[1] // blocks)] += mark
        assert cache.shape == (2, cache.shape[1], size, layer.kv_heads, layer.head_dim)
    for mark, (table, cache) in enumerate(zip(groups.tables, caches, strict=True), 1):
        assert (cache[:, blocks_of[table] * (cache.shape[1] // blocks)] == mark).all()
    outside = [block for block in range(blocks) if block not in blocks_of.values()]
    assert all((pool[:, block] == 0).all() for pool in pools for block in outside)


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        (layers(4, lambda index: True, 9), ""),
        (layers(4, lambda index: index % 2 == 0, 9, kv_heads=3), "do not divide"),
        (layers(4, lambda index: index > 0, 9), "do not divide"),
        (layers(24, lambda index: index == 0, 9), "do not divide"),
    ],
)
def test_other_models_have_one_table(specs: list[AttentionSpec], reason: str) -> None:
    groups = group_layers(specs)
    assert groups.window_tables == 0 and list(groups.places) == list(range(len(specs)))
    assert reason in groups.reason and bool(groups.reason) == bool(reason)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"windowed_kv_cache": "off"}, "is off"),
        ({"kv_cache": "contiguous"}, "contiguous"),
        ({"max_model_len": 9}, "no sequence is longer than the window of 9"),
    ],
)
def test_the_start_says_why_there_is_one_table(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = EngineConfig(model=str(make_checkpoint("gemma3", tmp_path)), **options)
    spec = describe_model(tmp_path, read_config(tmp_path), "auto")
    plan = agree([ProbedDevice("cpu", "float32")], config, spec)
    [line] = report_groups(choose_groups(config, spec, plan))
    assert reason in line


def test_a_draft_model_keeps_all_tokens(tmp_path: Path) -> None:
    folder = make_checkpoint("mistral", tmp_path)
    spec = describe_model(folder, read_config(folder), "auto")
    for draft, expected in ((None, "keep no more"), (str(folder), "a draft model keeps all tokens")):
        config = EngineConfig(model=str(folder), draft_model=draft)
        [line] = report_groups(choose_groups(config, spec, agree([ProbedDevice("cpu", "float32")], config, spec)))
        assert expected in line
