"""The engine whose batch lives on the device answers as the ordinary one; its kernels are interpreted here."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.errors import ConfigError
from kvern.request.sampling_params import StructuredOutput
from kvern.request.step import StepTooLarge
from kvern.runner.kernel_backend import KernelBackend
from tests.support.drafting_requests import PROMPTS
from tests.support.failing_runner import FailingRunner
from tests.support.families import FAMILIES, make_checkpoint
from tests.support.internals import check_integrity, core_of, decoder_of, engine_of, vocab_size_of
from tests.support.kernels.device_engines import NETS, OPTIONS, WITH_STATES
from tests.support.outputs import chosen_logprobs, token_ids
from tests.support.peft_adapters import make_adapter
from tests.support.speculation import AnyLength, speculating
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.usefixtures("few_products")

SDPA = {"attention_backend": "torch_sdpa"}
BY_DAY = ("qwen3_moe", "gemma4")
BY_NIGHT = (
    "llama",
    "gemma2",
    "olmo2",
    "gemma3",
    "qwen3_5",
    "qwen3",
    "glm4",
    "cohere",
    "smollm3",
    "mixtral",
    "ministral3",
    "minimax_m2",
    "glm4_moe_groups",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "gemma4_vision",
    "gemma4_experts",
    "lfm2_moe",
    "granitemoehybrid",
    "nemotron_h",
    "falcon_h1",
)
FAMILIES_BY_MECHANISM = [
    *(name for name in BY_DAY if name in FAMILIES),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in BY_NIGHT if name in FAMILIES),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", path, num_hidden_layers=2)
    return path


@pytest.mark.parametrize("family", FAMILIES_BY_MECHANISM)
def test_families_answer_alike(family: str, tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    make_checkpoint(family, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    expected = LLM(str(tmp_path), device="cpu", **OPTIONS).generate(PROMPTS, params)
    found = on_device(tmp_path, **OPTIONS).generate(PROMPTS, params)
    assert token_ids(found) == token_ids(expected)
    assert list(chosen_logprobs(found)) == pytest.approx(list(chosen_logprobs(expected)), abs=2e-4)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
@pytest.mark.parametrize(
    ("options", "close"),
    [
        ({}, 2e-4),
        pytest.param(SDPA, 2e-4, marks=pytest.mark.nightly),
        pytest.param({"quantization": "int8"}, 0.1, marks=pytest.mark.nightly),  # rows are rounded, too
    ],
    ids=str,
)
def test_latents_beside_adapters_and_quantized_weights(
    options: dict[str, Any], close: float, tmp_path: Path, on_device: Callable[..., LLM]
) -> None:
    made = make_checkpoint("glm4_moe_lite", tmp_path / "model", num_hidden_layers=1, mlp_layer_types=["dense"])
    modules = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    adapter = make_adapter(made, tmp_path / "one", 1, target_modules=modules)
    places = {"max_adapters": 2, "max_adapter_rank": 16, "adapters": {"one": str(adapter)}, "max_batch_tokens": 9}
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1)
    makers = partial(on_device, made), partial(LLM, str(made), device="cpu")
    engines = [make(**(OPTIONS | places | options)) for make in makers]
    for _ in range(2):  # with the prompts cached
        found, expected = (
            list(chosen_logprobs(llm.generate(PROMPTS, params, adapter=["one", None, "one"]))) for llm in engines
        )
        # Behind an answer's first token engines may go on with different ones.
        assert found[::2] == pytest.approx(expected[::2], abs=close)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False, "prefix_cache": False, "deterministic": True, "max_batch_tokens": 8},
        pytest.param({"overlap": False, "prefix_cache": False, "chunked_prefill": False}, marks=pytest.mark.nightly),
        pytest.param({"deterministic": True, "max_batch_tokens": 8}, marks=pytest.mark.nightly),
        pytest.param({"kv_cache": "contiguous", "batching": "static"}, marks=pytest.mark.nightly),
        pytest.param(SDPA | {"kv_cache_tokens": 48, "max_model_len": 48}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_switches_leave_the_answers(options: dict[str, Any], folder: Path, on_device: Callable[..., LLM]) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=4, n=2, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    ]
    expected = LLM(str(folder), device="cpu", **OPTIONS).generate(PROMPTS, params)
    llm = on_device(folder, **(OPTIONS | options))
    assert token_ids(llm.generate(PROMPTS, params)) == token_ids(expected)
    again = llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert token_ids(again) == [[token_ids(expected)[0][0][:2]]], "with the prompt cached"
    check_integrity(llm)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters(folder: Path, tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    """In one batch, and one row alone, whose layers are then not fused."""
    adapters = {
        "one": make_adapter(folder, tmp_path / "one", 1, r=3, target_modules=["q_proj", "v_proj", "down_proj"]),
        "two": make_adapter(folder, tmp_path / "two", 2, r=9),
    }
    places = {"max_adapters": 2, "max_adapter_rank": 16}
    options = OPTIONS | places | {"adapters": {name: str(path) for name, path in adapters.items()}}
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    expected, found = LLM(str(folder), device="cpu", **options), on_device(folder, **options)
    mixed, names = (PROMPTS, params), ["two", None, "one"]
    assert token_ids(found.generate(*mixed, adapter=names)) == token_ids(expected.generate(*mixed, adapter=names))
    alone = token_ids(found.generate(PROMPTS[0], params, adapter="one"))
    assert alone == token_ids(expected.generate(PROMPTS[0], params, adapter="one"))
    assert alone != token_ids(expected.generate(PROMPTS[0], params)) == token_ids(found.generate(PROMPTS[0], params))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"attention_backend": "torch_sdpa"}, marks=pytest.mark.nightly)], ids=str
)
def test_drafts_leave_the_answers(options: dict[str, Any], folder: Path, on_device: Callable[..., LLM]) -> None:
    """Two steps in flight: rows behind drafts begin where only the device knows, and so do drafts that it guesses."""
    plain: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 9, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
        SamplingParams(**plain, repetition_penalty=2.5, presence_penalty=2.0, frequency_penalty=2.0, logprobs=1),
        SamplingParams(temperature=1.5, seed=3, max_tokens=9, min_tokens=7, stop_token_ids=list(range(0, 100, 3))),
        SamplingParams(
            **plain, top_p=0.9, typical_p=0.9, dry_multiplier=2.0, dry_allowed_length=1, xtc_probability=0.5
        ),
    ]
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    expected = LLM(str(folder), device="cpu", **OPTIONS).generate(prompts, params)
    llm = on_device(folder, **(OPTIONS | options))
    for guessed_there in (False, True):
        with speculating(llm, expected, 0.7, most=3, on_device=guessed_there) as oracle:
            found = llm.generate(prompts, params)
        assert oracle.guessed > 10
        assert token_ids(found) == token_ids(expected)
        assert list(chosen_logprobs(found)) == pytest.approx(list(chosen_logprobs(expected)), abs=2e-4)
        check_integrity(llm)


@pytest.mark.nightly
def test_a_draft_model_guesses_without_the_host(folder: Path, on_device: Callable[..., LLM]) -> None:
    """The model guesses for itself: its drafts are right if the keys that they were guessed by are."""
    params = [
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=5, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    ]
    expected = LLM(str(folder), device="cpu", **OPTIONS).generate(PROMPTS, params)
    llm = on_device(folder, draft_model=str(folder), **(OPTIONS | {"max_batch_tokens": 9}))
    core_of(llm).drafting = AnyLength(None, vocab_size_of(llm), 3)
    assert token_ids(llm.generate(PROMPTS, params)) == token_ids(expected)
    statistics = llm.statistics()
    assert statistics.accepted_tokens == statistics.draft_tokens > 8
    check_integrity(llm)


def test_everything_that_changes_logits(folder: Path, on_device: Callable[..., LLM]) -> None:
    plain: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_tokens": 3, "ignore_eos": True}
    params = [
        SamplingParams(**plain, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5),
        SamplingParams(**plain, logit_bias={7: 4.0, 9: -50.0}, logprobs=2),
        SamplingParams(**plain, typical_p=0.6),
        SamplingParams(**plain, allowed_token_ids=[3, 4, 5, 6, 7]),
        SamplingParams(temperature=0, max_tokens=3, min_tokens=2),
        SamplingParams(**plain, top_p=0.9, top_k=20, min_p=0.01),
        SamplingParams(**plain, dry_multiplier=2.0, top_n_sigma=1.5, xtc_probability=0.7, dynatemp_range=0.5),
    ]
    prompts = [PROMPTS[0]] * len(params)
    expected = LLM(str(folder), device="cpu", **OPTIONS).generate(prompts, params)
    found = on_device(folder, **OPTIONS).generate(prompts, params)
    assert token_ids(found) == token_ids(expected)
    assert list(chosen_logprobs(found)) == pytest.approx(list(chosen_logprobs(expected)), abs=2e-4)


def test_beams(tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    """They wait for the host, and others run meanwhile; some lose their blocks."""
    folder = make_tiny_model(tmp_path / "model")
    form = StructuredOutput(choice=["a", "ab", "ba"])
    plain = SamplingParams(beam_width=3, n=3, max_tokens=4, logprobs=1, repetition_penalty=1.5, ignore_eos=True)
    params = [
        plain,
        SamplingParams(temperature=0.9, seed=3, max_tokens=5, ignore_eos=True),
        SamplingParams(beam_width=2, n=2, max_tokens=4, structured=form),
    ]
    prompts = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 7, 8, 9]]
    expected = LLM(str(folder), device="cpu", **OPTIONS).generate(prompts, params)
    llm = on_device(folder, **(OPTIONS | {"kv_cache_tokens": 20, "max_model_len": 20}))
    found = llm.generate(prompts, params)
    assert token_ids(found) == token_ids(expected)
    assert list(chosen_logprobs(found)) == pytest.approx(list(chosen_logprobs(expected)), abs=2e-4)
    for output, wanted in zip(found, expected, strict=True):
        for answer, other in zip(output.outputs, wanted.outputs, strict=True):
            assert answer.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=2e-4)
    check_integrity(llm)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.nightly), {"max_batch_tokens": 5}], ids=str)
def test_scores(options: dict[str, Any], folder: Path, on_device: Callable[..., LLM]) -> None:
    """Contexts come from the prefix cache, in the same step already."""
    pairs = [(context, continuation) for context in PROMPTS for continuation in ([7], [9, 30, 12])]
    expected = LLM(str(folder), device="cpu", **OPTIONS).score(pairs)
    llm = on_device(folder, **(OPTIONS | options))
    for _ in range(2):
        for found, score in zip(llm.score(pairs), expected, strict=True):
            assert found.token_logprobs == pytest.approx(score.token_logprobs, abs=2e-4)
            assert found.is_greedy == score.is_greedy


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_next", marks=pytest.mark.nightly)])
def test_a_step_that_runs_out_of_memory_is_run_in_parts(
    family: str,
    tmp_path: Path,
    on_device: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = make_checkpoint(family, tmp_path, **(NETS if family == "qwen3_next" else {}), num_hidden_layers=2)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    expected = LLM(str(folder), device="cpu", **OPTIONS).generate(PROMPTS, params)
    llm = on_device(folder, **OPTIONS)
    decoder = decoder_of(llm)
    forward = decoder.forward

    def small_card(token_ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        hidden: torch.Tensor = forward(token_ids, *arguments)
        if token_ids.shape[0] > 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return hidden

    monkeypatch.setattr(decoder, "forward", small_card)
    found = llm.generate(PROMPTS, params)
    assert token_ids(found) == token_ids(expected)
    assert list(chosen_logprobs(found)) == pytest.approx(list(chosen_logprobs(expected)), abs=2e-4)
    assert "out of GPU memory in a step of" in caplog.text


def test_a_start_whose_largest_step_does_not_fit_says_what_to_lower(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> int:
        raise StepTooLarge("(3 MiB free)") from torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(KernelBackend, "_measure", fails)
    with pytest.raises(ConfigError, match=r"max_batch_tokens \d+ tokens does not fit .* \(3 MiB free\): lower"):
        on_device(make_tiny_model(tmp_path / "model"), **OPTIONS)


@pytest.mark.nightly
@pytest.mark.parametrize("where", [pytest.param("before", marks=pytest.mark.nightly), "result"])
def test_a_failed_step_ends_the_one_that_causes_it(where: str, tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    """With steps in flight behind it: whatever it was to bring to the device comes anew."""
    folder = make_tiny_model(tmp_path / "model")
    form = StructuredOutput(json={"type": "array", "items": {"enum": [1, 22, "a"]}, "maxItems": 2})
    params = [
        SamplingParams(temperature=0.9, seed=3, max_tokens=4, structured=form),
        SamplingParams(temperature=0.9, seed=5, max_tokens=4, ignore_eos=True, logprobs=1),
        SamplingParams(beam_width=2, n=2, max_tokens=3, ignore_eos=True),
    ]
    prompts = [[8, 9, 10, 11], [5, 6, 7, 8, 9], [5, 6, 7, 12]]
    expected = LLM(str(folder), device="cpu", **OPTIONS).generate(prompts, params)
    llm = on_device(folder, **(OPTIONS | {"max_batch_requests": 8}))
    runner = FailingRunner(llm, where)
    params = [*params, SamplingParams(temperature=0, max_tokens=4)]
    *found, marked = llm.generate([*prompts, [5, 251, 8]], params, on_error="return")
    assert marked.failure == "its step failed: RuntimeError: as planned"
    assert token_ids(found) == token_ids(expected)
    assert 2 <= runner.failures <= 8
    check_integrity(llm)


def test_aborted_requests_leave_nothing_behind(folder: Path, on_device: Callable[..., LLM]) -> None:
    llm = on_device(folder, **OPTIONS)
    engine = engine_of(llm)
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.abort(["0", "2"])
    while engine.has_work:
        engine.step()
    engine.core.scheduler.check_integrity()
    again = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    expected = LLM(str(folder), device="cpu", **OPTIONS).generate(
        [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    )
    assert token_ids(again) == token_ids(expected)


@pytest.mark.parametrize(
    ("family", "budget"),
    [
        pytest.param(family, budget, marks=[] if (family, budget) == ("qwen3_next", 7) else [pytest.mark.nightly])
        for family, budget in itertools.product(WITH_STATES, (7, 64))
    ],
)
def test_states_go_on_from_chunk_to_chunk_and_from_answer_to_answer(
    family: str, budget: int, tmp_path: Path, on_device: Callable[..., LLM]
) -> None:
    """Runs beside single tokens, samples that share a prompt, prompts that begin alike."""
    make_checkpoint(family, tmp_path, **WITH_STATES[family])
    options = OPTIONS | {"max_batch_tokens": budget}
    head = list(range(20, 28))
    prompts = [[*head, 7, 9], [*head, 41], [3, 4, 5]]
    params = [SamplingParams(temperature=0, max_tokens=3, n=count, ignore_eos=True) for count in (1, 2, 1)]
    found = []
    for llm in (LLM(str(tmp_path), device="cpu", **options), on_device(tmp_path, **options)):
        with llm:
            outputs = llm.generate(prompts, params), llm.generate([[*prompts[0], 50]], params[0])
            found.append([token_ids(output) for output in outputs])
            assert llm.statistics().cached_tokens > 0
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "qwen3_next" else [pytest.mark.nightly]) for name in WITH_STATES]
)
def test_states_see_the_drafts_that_are_accepted(family: str, tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    """Beside prompts and single tokens, with two steps in flight; a conversation goes on with what they leave."""
    make_checkpoint(family, tmp_path, **WITH_STATES[family])
    options, prompts = OPTIONS | {"max_batch_tokens": 12}, PROMPTS[:2]
    params = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True),
    ]
    with LLM(str(tmp_path), device="cpu", **options) as cpu, on_device(tmp_path, **options) as llm:
        expected = cpu.generate(prompts, params)
        with speculating(llm, expected, 0.7, most=3) as oracle:
            assert token_ids(llm.generate(prompts, params)) == token_ids(expected)
        assert oracle.guessed > 5
        longer, more = [[*prompts[0], *expected[0].outputs[0].token_ids, 50]], params[0].replace(max_tokens=3)
        assert token_ids(llm.generate(longer, more)) == token_ids(cpu.generate(longer, more))
