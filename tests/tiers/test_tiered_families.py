"""Hits of every kind of model: with windows, with states, of latents, in 8 bits, out of host memory and off a disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.cache.states import StatePool
from kvern.cache.windows import WindowedBlocks
from tests.support.families import make_checkpoint
from tests.support.idle import core_here, is_idle
from tests.support.peft_adapters import make_adapter
from tests.support.tiers import HOST, PAGE_TOKENS, answer, check_hits, figures, forget, settle, trust

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "block_size": 4,
    "max_model_len": 96,
    "kv_cache_tokens": 240,
    "max_batch_requests": 2,
    "max_batch_tokens": 32,
}
PROMPT = [10 + place * 7 % 110 for place in range(61)]
WINDOWED = ["gemma3", "gpt_oss", "mixtral"]
"""Some layers have a window, in several tables, in one; all have."""
HYBRID = ["qwen3_5", "nemotron_h"]
RARER = ("gpt_oss", "mixtral", "nemotron_h")
SEVERAL = ["gemma3", "qwen3_5", *(pytest.param(family, marks=pytest.mark.nightly) for family in RARER)]
NIGHTLY = ["gemma2", "gemma4", "phi3", "cohere2", "olmo3", "qwen3_next", "granitemoehybrid", "lfm2", "deepseek_v3"]
FAMILIES = [
    "llama",
    *WINDOWED,
    *HYBRID,
    *(pytest.param(family, marks=pytest.mark.nightly) for family in NIGHTLY),
]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PAGE_TOKENS, 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.mark.parametrize("kind", ["host", pytest.param("disk", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_gives_the_bits_of_the_prefix_tree(
    family: str, kind: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    option = HOST if kind == "host" else (f"disk:{tmp_path / 'pages'}:1GB",)
    with LLM(str(model(family)), kv_tier=option, **OPTIONS) as llm:
        cache = core_here(llm).scheduler.cache
        assert (cache.extension(WindowedBlocks) is not None) == (family in (*WINDOWED, *NIGHTLY[:5]))
        assert (cache.extension(StatePool) is not None) == (family in (*HYBRID, *NIGHTLY[5:8]))
        assert check_hits(llm, PROMPT) == 56


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["gpt2", "mimo_v2_flash", "llama"])
def test_models_of_transformers_have_pages(family: str, model: Callable[[str], Path]) -> None:
    """Which are no other's: those of kvern's own model are misses."""
    options = OPTIONS | {"model_implementation": "transformers"}
    with LLM(str(model(family)), kv_tier=HOST, **options) as llm:
        assert check_hits(llm, PROMPT) == 56


def test_pages_of_transformers_are_no_pages_of_kverns(model: Callable[[str], Path], tmp_path: Path) -> None:
    option = (f"disk:{tmp_path / 'pages'}:1GB",)
    for implementation in ("kvern", "transformers"):
        with LLM(str(model("llama")), kv_tier=option, model_implementation=implementation, **OPTIONS) as llm:
            trust(llm)
            assert answer(llm, PROMPT)[1] == 0
            settle(llm)


TALKING: dict[str, Any] = {"kv_cache_tokens": 150, "max_batch_tokens": 24}
"""Less memory than four conversations take."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", SEVERAL)
def test_conversations_that_left_the_cache_go_on(family: str, model: Callable[[str], Path]) -> None:
    """Each turn evicts what the device has of all other conversations."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    plain = LLM(str(model(family)), **OPTIONS)
    tiered = LLM(str(model(family)), kv_tier=HOST, **OPTIONS | TALKING)
    trust(tiered)
    talks = [[10 + (talk * 31 + place * 7) % 110 for place in range(34)] for talk in range(4)]
    for turn in range(3):
        settle(tiered)
        core_here(tiered).scheduler.cache.tree.evict(100)
        for talk in talks:
            expected, _ = answer(plain, talk, params)
            found, cached = answer(tiered, talk, params)
            assert found.token_ids == expected.token_ids
            prompt_before = len(talk) - 7  # its last pages were saved, and a state behind them
            assert not turn or cached >= (prompt_before - 1) // 8 * 8
            talk += [*found.token_ids, 7]
    settle(tiered)
    assert figures(tiered).hit_tokens and is_idle(tiered)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", SEVERAL)
def test_many_at_once_are_answered_out_of_little_memory(family: str, model: Callable[[str], Path]) -> None:
    """Requests are preempted, their pages loaded, and others wait for the same loads."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[*PROMPT[: 8 * (number % 3 + 2)], *range(20 + number, 34 + number)] for number in range(9)]
    with LLM(str(model(family)), **OPTIONS) as plain:
        expected = [answer(plain, prompt, params)[0].token_ids for prompt in prompts]
    with LLM(str(model(family)), kv_tier=HOST, **OPTIONS | TALKING | {"max_batch_requests": 4}) as llm:
        trust(llm)
        for _ in range(3):
            outputs = llm.generate(prompts, params)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            settle(llm)
            assert is_idle(llm)
        assert figures(llm).hit_tokens and figures(llm).read_bytes


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma3", {"kv_cache_dtype": "int8"}),
        ("gpt_oss", {"deterministic": True}),
        ("gemma3", {"cpu_kernels": False}),
        ("qwen3_5", {"kv_cache_dtype": "int8"}),
        ("qwen3_5", {"cpu_kernels": False}),
        ("mixtral", {"block_size": 8}),
        ("nemotron_h", {"block_size": 16}),
    ],
)
def test_hits_with_options(family: str, options: dict[str, Any], model: Callable[[str], Path]) -> None:
    with LLM(str(model(family)), kv_tier=HOST, **OPTIONS | options) as llm:
        assert check_hits(llm, PROMPT) in (48, 56)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "modules"), [("gemma3", ["q_proj", "v_proj"]), ("qwen3_5", ["in_proj_qkv", "q_proj"])]
)
def test_pages_are_those_of_an_adapter(
    family: str, modules: list[str], model: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = make_adapter(model(family), tmp_path / "one", 1, target_modules=modules)
    with LLM(str(model(family)), kv_tier=HOST, adapters={"one": str(adapter)}, **OPTIONS) as llm:
        assert check_hits(llm, PROMPT, adapter="one") == 56
        forget(llm)
        assert answer(llm, PROMPT)[1] == 0, "pages of an adapter are found without it"
