"""The engine on a GPU: the answers of the CPU's, whatever is switched on or off.

Run with `pytest -m gpu`.
"""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, RequestOutput, SamplingParams
from kvern.errors import ConfigError
from kvern.request.sampling_params import StructuredOutput
from tests.support.families import CPU_ALONE, FAMILIES, make_checkpoint
from tests.support.gpu_engines import GREEDY, HALVES, SMALL, held_out, steps
from tests.support.internals import check_integrity, core_of, engine_of, runner_of
from tests.support.outputs import token_ids
from tests.support.peft_adapters import make_adapter
from tests.support.processors import Step, follow, install
from tests.support.scaled_rows import quantize
from tests.support.tiny_model import make_tiny_model
from tests.support.trained_adapters import ADAPTERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def logprobs(output: RequestOutput) -> list[float]:
    """Of the prompt's tokens, then of the answer's."""
    entries = [*(output.prompt_logprobs or [None])[1:], *(output.outputs[0].logprobs or [])]
    return [next(iter(entry.values())).logprob for entry in entries if entry]


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    """What the CPU engine answers to the held-out conversations."""
    return token_ids(LLM(device="cpu", dtype="float32", max_model_len=512).chat(held_out(), GREEDY))


def test_200_held_out_prompts_get_the_cpus_answers(expected: list[list[list[int]]]) -> None:
    assert len(expected) == 200
    assert token_ids(LLM(device="cuda", **(SMALL | {"max_batch_requests": 512})).chat(held_out(), GREEDY)) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graphs": False},
        {"overlap": False},
        {"triton_kernels": False},
        {"deterministic": True},
        {"attention_backend": "triton"},
        {"attention_backend": "torch_sdpa"},
        {"linear_backend": "cublas"},
        {"linear_backend": "triton"},
        {"prefix_cache": False},
        {"chunked_prefill": False},
        {"max_batch_tokens": 64, "max_batch_requests": 64},
        {"kv_cache": "contiguous"},
        {"batching": "static"},
        {"block_size": 32},
        {"kv_cache_tokens": 1024},
        {"cuda_graphs": False, "overlap": False, "prefix_cache": False, "kv_cache": "contiguous", "batching": "static"},
    ],
    ids=str,
)
def test_every_switch_leaves_the_answers(options: dict[str, Any], expected: list[list[list[int]]]) -> None:
    llm = LLM(device="cuda", **(SMALL | options))
    assert token_ids(llm.chat(held_out()[::5], GREEDY)) == expected[::5]
    assert token_ids(llm.chat(held_out()[:10], GREEDY)) == expected[:10], "with some prompts cached"
    check_integrity(llm)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in CPU_ALONE], ids=str)
def test_family_in_bfloat16_is_as_near_to_float32_as_on_the_cpu(family: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    if FAMILIES[family][0] not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {FAMILIES[family][0]} to make a checkpoint with")
    make_checkpoint(family, tmp_path)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 90) for _ in range(length)] for length in (5, 16, 33, 7)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    options: dict[str, Any] = {"kv_cache_tokens": 1024, "max_model_len": 64, "max_batch_requests": 8}

    def prompt_logprobs(device: str, dtype: str) -> torch.Tensor:
        outputs = LLM(str(tmp_path), device=device, dtype=dtype, **options).generate(prompts, params)
        return torch.tensor([number for output in outputs for number in logprobs(output)])

    exact = prompt_logprobs("cpu", "float32")
    rounding = (prompt_logprobs("cpu", "bfloat16") - exact).abs()
    found = (prompt_logprobs("cuda", "bfloat16") - exact).abs()
    assert found.median() < 1.5 * rounding.median() + 0.01
    fields = FAMILIES[family][1]
    # Where a router rounds, it may choose another expert: far off, rarely.
    if {"num_experts_per_tok", "top_k_experts"} & fields.get("text_config", fields).keys():
        assert (prompt_logprobs("cuda", "float32") - exact).abs().max() < 2e-3
    else:
        assert found.mean() < 1.5 * rounding.mean() + 0.01
        assert found.max() < 3 * rounding.max() + 0.05


@pytest.mark.parametrize("backend", ["flashinfer", "flash_attn"])
def test_optional_attention_backends(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        with pytest.raises(ConfigError, match=f"{backend} is not installed: pip install"):
            LLM(device="cuda", attention_backend=backend, max_model_len=512, kv_cache_tokens=8192)
        return
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    found = []
    for name in ("triton", backend):
        llm = LLM(device="cuda", dtype="bfloat16", attention_backend=name, max_model_len=512, kv_cache_tokens=16384)
        found.append([logprobs(output)[:30] for output in llm.chat(held_out()[:20], params)])
    for with_triton, with_other in zip(*found, strict=True):
        assert with_other == pytest.approx(with_triton, abs=0.25)


def test_sampling_depends_on_nothing_but_the_request() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=11, max_tokens=24, n=2)
    prompts = held_out()[:12]
    whole = LLM(device="cuda", **SMALL)
    together = token_ids(whole.chat(prompts, params))
    alone = [token_ids(whole.chat([prompt], params))[0] for prompt in prompts]
    eager = token_ids(LLM(device="cuda", cuda_graphs=False, overlap=False, **SMALL).chat(prompts, params))
    on_cpu = token_ids(LLM(device="cpu", dtype="float32", max_model_len=512).chat(prompts, params))
    assert together == alone == eager == on_cpu


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graphs": False},
        {"max_adapters": 1},
        {"max_adapter_rank": 128},
        {"triton_kernels": False},
        {"deterministic": True},
        {"max_batch_tokens": 64, "max_batch_requests": 64},
        {"kv_cache_tokens": 1024},
    ],
    ids=str,
)
def test_adapters_answer_as_on_the_cpu(options: dict[str, Any]) -> None:
    """Mixed in one batch, then one row alone, whose layers are not fused."""
    conversations = held_out()[:64]
    names = [(None, "captain", "gull", "captain", None)[index % 5] for index in range(len(conversations))]
    here = {"adapters": ADAPTERS, **SMALL}
    expected = token_ids(LLM("kvern-1m", device="cpu", **here).chat(conversations, GREEDY, adapter=names))
    llm = LLM("kvern-1m", device="cuda", **(here | options))
    assert token_ids(llm.chat(conversations, GREEDY, adapter=names)) == expected
    for index in (0, 1, 2):
        assert token_ids(llm.chat([conversations[index]], GREEDY, adapter=names[index])) == [expected[index]]
    check_integrity(llm)


def test_structured_answers_are_the_cpus() -> None:
    """Beside free requests, which keep their answers; also where the next step is planned before a token is known."""
    form = StructuredOutput(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    prompts = held_out()[:8]
    params = [
        SamplingParams(temperature=0, max_tokens=40, structured=form if index % 2 else None) for index in range(8)
    ]
    expected = token_ids(LLM(device="cpu", dtype="float32", max_model_len=512).chat(prompts, params))
    for overlap in (True, False):
        assert token_ids(LLM(device="cuda", overlap=overlap, **SMALL).chat(prompts, params)) == expected


def test_embeddings_are_the_cpus(tmp_path: Path) -> None:
    """Also of prompts whose last token alone is computed, beside decodes that a graph would run."""
    folder = make_tiny_model(tmp_path / "model")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    prompts = [list(range(10, 90)), [7, 8, 9], list(range(10, 75))]
    expected = LLM(str(folder), device="cpu").embed(prompts)
    llm = LLM(str(folder), device="cuda", max_model_len=256, kv_cache_tokens=4096)
    for _ in range(2):
        for given, vector in zip(llm.embed(prompts), expected, strict=True):
            assert given == pytest.approx(vector, abs=1e-3)


@pytest.mark.parametrize("options", [{}, {"shared_prefix_attention": False}], ids=str)
def test_requests_that_begin_alike(options: dict[str, Any]) -> None:
    """Two groups with prefixes of their own, and some with none; members leave, and others take their rows."""
    rng = random.Random(5)
    prefixes = [[rng.randrange(5, 400) for _ in range(300)] for _ in range(2)]
    prompts = [
        (prefixes[index % 3] if index % 3 < 2 else []) + [rng.randrange(5, 400) for _ in range(index + 1)]
        for index in range(60)
    ]
    params = [
        SamplingParams(temperature=0.5, seed=index, max_tokens=4 + index % 20, ignore_eos=True) for index in range(60)
    ]
    config = SMALL | {"max_batch_requests": 24}
    expected = token_ids(LLM(device="cpu", **config).generate(prompts, params))
    llm = LLM(device="cuda", **(config | options))
    assert token_ids(llm.generate(prompts, params)) == expected
    graphs = runner_of(llm).graphs[0].captured
    shared = [graph.inputs.groups for shape, graph in graphs.items() if shape.prefix]
    assert any(shared) == llm.config.shared_prefix_attention


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"kv_cache_tokens": 1024, "overlap": False}], ids=str)
def test_beams_are_the_cpus(options: dict[str, Any]) -> None:
    """Beside requests that sample, and behind a prefix that all beams have in common."""
    rng = random.Random(5)
    prompts = [[rng.randrange(5, 400) for _ in range(length)] for length in (290, 7, 300, 33)]
    beams = SamplingParams(beam_width=6, n=3, max_tokens=40, early_stopping="never", logprobs=1)
    params = [beams, SamplingParams(temperature=0.8, seed=3, max_tokens=60), beams.replace(logprobs=None), beams]
    expected = LLM(device="cpu", **SMALL).generate(prompts, params)
    found = LLM(device="cuda", **(SMALL | options)).generate(prompts, params)
    assert token_ids(found) == token_ids(expected)
    for output, wanted in zip(found, expected, strict=True):
        for answer, other in zip(output.outputs, wanted.outputs, strict=True):
            assert answer.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-2)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    "options", [{}, {"cuda_graphs": False}, {"model": "kvern-1m", "adapters": ADAPTERS, "max_adapters": 1}], ids=str
)
def test_the_hot_path_never_waits_for_the_device(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """A step that waits would fail."""
    llm = LLM(device="cuda", **(HALVES | options))
    plain = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=200, ignore_eos=True)
    wide = SamplingParams(
        temperature=0.8,
        max_tokens=40,
        ignore_eos=True,
        logprobs=2,
        repetition_penalty=1.2,
        dry_multiplier=0.8,
        dry_sequence_breakers=["\n", "once upon"],
        logit_bias={5: 1.0},
        prompt_logprobs=1,
    )
    prompts = [[7 + index] * (20 + index) for index in range(8)]
    adapters = [None, *llm.adapters, None]

    def run() -> None:
        """Requests join a running batch, decode beside prefills, use what changes logits, and are aborted."""
        for index in range(4):
            engine_of(llm).add(f"{index}", prompts[index], plain, adapter=adapters[index % len(adapters)])
        steps(llm, 6)
        for index in range(4, 8):
            engine_of(llm).add(f"{index}", prompts[index], wide, adapter=adapters[index % len(adapters)])
        engine_of(llm).add("beams", prompts[0], SamplingParams(beam_width=4, n=2, max_tokens=30, logprobs=1))
        steps(llm, 6)
        engine_of(llm).abort(["0", "5"])
        steps(llm, 30)
        engine_of(llm).abort(engine_of(llm).request_ids)
        steps(llm, 3)

    run()  # compiles, captures, fills the allocator's caches
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "failed" not in caplog.text


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"max_batch_tokens": 64}], ids=str)
def test_scores_are_the_cpus(options: dict[str, Any]) -> None:
    head = [7 + index % 90 for index in range(150)]
    pairs = [(head[:length], [token, 9, 11]) for length in (1, 40, 150) for token in range(20, 60)]
    expected = LLM(device="cpu", **SMALL).score(pairs)
    llm = LLM(device="cuda", **SMALL, **options)
    for _ in range(2):  # the second time with cached contexts
        for found, score in zip(llm.score(pairs), expected, strict=True):
            assert found.token_logprobs == pytest.approx(score.token_logprobs, abs=2e-3)


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"overlap": False}], ids=str)
def test_logits_processors(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They see the token that the host does not know yet, and fail alone."""
    monkeypatch.syspath_prepend(str(install(tmp_path)))
    llm = LLM(device="cuda", logits_processors=("follow", "break"), **SMALL, **options)
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    asked: list[dict[str, Any] | None] = [{"follow": {"by": by}} for by in range(1, 9)]
    asked += [None, {"break": {"how": "nan", "after": 5}}, {"break": {"how": "apply", "after": 7}}]
    [alone] = llm.generate([[5, 6, 7]], plain)
    params = [plain.replace(logits_processors=each) for each in asked]
    outputs = llm.generate([[5, 6, 7]] * len(asked), params, on_error="return")
    for output, by in zip(outputs[:8], range(1, 9), strict=True):
        expected = [7]
        for _ in range(40):
            expected.append(follow(expected[-1], Step(by)))
        assert output.outputs[0].token_ids == expected[1:]
    assert outputs[8].outputs[0].token_ids == alone.outputs[0].token_ids
    assert [len(output.outputs[0].token_ids) for output in outputs[9:]] == [6, 8]
    assert all(output.failure for output in outputs[9:])


def test_deterministic_logits_are_the_same_to_the_last_bit_in_any_batch() -> None:
    llm = LLM(device="cuda", deterministic=True, prefix_cache=False, **HALVES)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    other = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    rng = random.Random(3)
    probe = [rng.randrange(5, 400) for _ in range(45)]
    seen: list[tuple[Any, Any]] = []
    while len(seen) < 200:
        company = [[rng.randrange(5, 400) for _ in range(rng.randrange(1, 90))] for _ in range(rng.randrange(0, 64))]
        copies = rng.randrange(1, 9)
        prompts = company + [probe] * copies
        order = rng.sample(range(len(prompts)), len(prompts))
        outputs = llm.generate(
            [prompts[index] for index in order], [params if index >= len(company) else other for index in order]
        )
        probes = [output for output, index in zip(outputs, order, strict=True) if index >= len(company)]
        seen += [(output.prompt_logprobs, output.outputs[0].logprobs) for output in probes]
    assert all(item == seen[0] for item in seen)


def test_a_stop_costs_at_most_one_token_and_blocks_come_back() -> None:
    llm = LLM(device="cuda", prefix_cache=False, **HALVES)
    cache = core_of(llm).scheduler.cache
    free = cache.available_count
    first = llm.generate([[9] * 12], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))[0]
    stop = first.outputs[0].token_ids[4]
    index = first.outputs[0].token_ids.index(stop)
    output = llm.generate(
        [[9] * 12], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop_token_ids=[stop])
    )[0]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids == first.outputs[0].token_ids[: index + 1]
    engine_of(llm).add("aborted", [9] * 300, SamplingParams(max_tokens=100, ignore_eos=True))
    steps(llm, 8)
    engine_of(llm).abort(["aborted"])
    steps(llm, 2)
    check_integrity(llm)
    assert not engine_of(llm).has_work
    assert cache.available_count == free


@pytest.mark.parametrize(
    ("family", "layers"),
    [("llama3", "."), ("llama", r"layers\.1\.mlp"), ("mixtral", "experts|mlp.gate$"), ("glm4_moe", ".")],
    ids=["tied", "some layers", "experts", "everything"],
)
@pytest.mark.parametrize("adapted", [False, True], ids=["", "adapted"])
def test_weights_of_another_format(family: str, layers: str, adapted: bool, tmp_path: Path) -> None:
    """In CUDA graphs, whose layers of one token are fused where the format can, and in prompts."""
    model = make_checkpoint(family, tmp_path / "model")
    made = quantize(model, tmp_path, layers)
    prompts = [[5, 9, 17, 33, 2, 81], [5, 9, 17, 33, 2, 80, 40, 41, 42], [100] * 10]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_tokens": 1024, "max_model_len": 64}
    name = None
    if adapted:
        name = "one"
        adapter = make_adapter(model, tmp_path / "one", 1, r=3, target_modules=["q_proj", "o_proj"])
        options |= {"max_adapters": 1, "adapters": {name: str(adapter)}}
    expected = LLM(str(made.rounded), device="cpu", **options).generate(prompts, params, adapter=name)
    llm = LLM(str(made.quantized), device="cuda", **options)
    for some in (prompts, prompts[:1]):
        outputs = llm.generate(some, params, adapter=name)
        assert token_ids(outputs) == token_ids(expected)[: len(some)]
        for found, wanted in zip(outputs, expected, strict=False):
            assert logprobs(found) == pytest.approx(logprobs(wanted), abs=2e-3)
