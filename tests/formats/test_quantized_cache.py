"""The KV cache in FP8 and INT8: the same answers in any company, and near those of a plain cache."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, RequestOutput, SamplingParams
from kvern.attention.eight_bit import LARGEST_CODE, codes_of
from kvern.errors import ConfigError, CorruptCheckpoint
from kvern.models.cache_scales import stored_scales
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from kvern.ranks.ranks import Ranks
from kvern.spec.model import ModelSpec
from tests.support.internals import check_integrity, runner_of, worker_of
from tests.support.peft_adapters import make_adapter
from tests.support.speculation import speculating
from tests.support.tiers import HOST, PAGE_TOKENS, check_hits, figures, forget, trust
from tests.support.tiny_model import make_tiny_model

PROMPTS = [[5, 9, 17, 33, 2, 81] * 3, [5, 9, 17, 33, 2, 81] * 2 + [40, 41, 42], [100] * 10, [7, 8, 9]]
OPTIONS: dict[str, Any] = {"max_model_len": 64, "kv_cache_tokens": 1024, "block_size": 4, "threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=1)
PLAIN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def engine(folder: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        made.append(LLM(str(options.pop("model", folder)), device="cpu", **(OPTIONS | options)))
        return made[-1]

    yield make
    for llm in made:
        check_integrity(llm)
        llm.close()


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    entries = (entry for output in outputs for entry in (output.prompt_logprobs or [])[1:])
    return [next(iter(entry.values())).logprob for entry in entries if entry]


def scales(llm: LLM) -> list[torch.Tensor]:
    return list(worker_of(llm)._loaded.eight_bit.scales)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_near_those_of_a_plain_cache(kind: str, dtype: str, engine: Callable[..., LLM]) -> None:
    plain, llm = engine(dtype=dtype), engine(dtype=dtype, kv_cache_dtype=kind)
    assert runner_of(llm).caches[0].dtype == KINDS[kind]
    expected, found = (logprobs(item.generate(PROMPTS, GREEDY)) for item in (plain, llm))
    differences = (torch.tensor(found) - torch.tensor(expected)).abs()
    assert 0 < differences.mean() < 0.12, "random weights tell small differences apart"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache": False},
        {"max_batch_tokens": 8, "max_batch_requests": 4},
        {"kv_cache": "contiguous", "batching": "static"},
        {"kv_cache_tokens": 68},
    ],
    ids=str,
)
def test_options_change_no_answer(kind: str, options: dict[str, Any], engine: Callable[..., LLM]) -> None:
    """The last one preempts: four sequences need 93 tokens."""
    llm, other = engine(kv_cache_dtype=kind), engine(kv_cache_dtype=kind, **options)
    expected = tokens(llm.generate(PROMPTS, PLAIN))
    assert tokens(other.generate(PROMPTS, PLAIN)) == expected
    assert [tokens(other.generate([prompt], PLAIN))[0] for prompt in PROMPTS] == expected, "alone, and cached"


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_is_exact(kind: str, engine: Callable[..., LLM]) -> None:
    """What is read of cached blocks is what was written, to the last bit, and a copied head of a block, too."""
    llm, cold = engine(kv_cache_dtype=kind), engine(kv_cache_dtype=kind, prefix_cache=False)
    llm.generate(PROMPTS[:1], PLAIN)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    prompt = [*PROMPTS[0][:15], 60, 61, 62, 63, 64]
    (hit,), (missed,) = (item.generate([prompt], params) for item in (llm, cold))
    assert hit.cached_tokens == 15
    assert tokens([hit]) == tokens([missed])
    cached = [next(iter(entry.values())).logprob for entry in hit.outputs[0].logprobs or []]
    computed = [next(iter(entry.values())).logprob for entry in missed.outputs[0].logprobs or []]
    assert cached == pytest.approx(computed, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_changes_nothing(kind: str, engine: Callable[..., LLM]) -> None:
    first, second = engine(kv_cache_dtype=kind), engine(kv_cache_dtype=kind)
    assert all(torch.equal(one, other) for one, other in zip(scales(first), scales(second), strict=True))
    found = [llm.generate(PROMPTS, GREEDY) for llm in (first, second)]
    assert tokens(found[0]) == tokens(found[1]) and logprobs(found[0]) == logprobs(found[1])


def test_samples_beams_and_drafts(engine: Callable[..., LLM]) -> None:
    llm, cold = engine(kv_cache_dtype="fp8"), engine(kv_cache_dtype="fp8", prefix_cache=False, max_batch_requests=3)
    drawn = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True)
    beams = SamplingParams(temperature=0, beam_width=3, n=2, max_tokens=8, ignore_eos=True)
    for params in (drawn, beams):
        assert tokens(llm.generate(PROMPTS, params)) == tokens(cold.generate(PROMPTS, params))
    expected = llm.generate(PROMPTS, PLAIN)
    with speculating(llm, expected) as oracle:
        assert tokens(llm.generate(PROMPTS, PLAIN)) == tokens(expected)
    assert oracle.guessed


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters(folder: Path, tmp_path: Path, engine: Callable[..., LLM]) -> None:
    path = str(make_adapter(folder, tmp_path / "one", 1, r=3, target_modules=["q_proj", "k_proj", "v_proj"]))
    plain, llm = (engine(adapters={"one": path}, **options) for options in ({}, {"kv_cache_dtype": "int8"}))
    mixed = [tokens(llm.generate(PROMPTS, PLAIN, adapter=["one", None, "one", None])) for _ in range(2)]
    assert mixed[0] == mixed[1], "the second from cached blocks"
    assert mixed[0][0] == tokens(llm.generate(PROMPTS[:1], PLAIN, adapter="one"))[0]
    expected = logprobs(plain.generate(PROMPTS, GREEDY, adapter=["one", None, "one", None]))
    differences = torch.tensor(logprobs(llm.generate(PROMPTS, GREEDY, adapter=["one", None, "one", None])))
    assert (differences - torch.tensor(expected)).abs().mean() < 0.12


def test_a_tier_keeps_codes(engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PAGE_TOKENS, 8)
    llm = engine(kv_cache_dtype="fp8", kv_cache_tokens=64, kv_tier=HOST)
    expected = tokens(engine(kv_cache_dtype="fp8").generate(PROMPTS, PLAIN))
    trust(llm)
    for _ in range(2):
        assert [tokens(llm.generate([prompt], PLAIN))[0] for prompt in PROMPTS] == expected
        forget(llm)
    assert figures(llm).hit_tokens
    check_hits(llm, list(range(100, 130)))


def test_what_a_token_takes(engine: Callable[..., LLM]) -> None:
    sizes = [engine(dtype="bfloat16", kv_cache_dtype=kind)._engine.layout.token_bytes for kind in ("auto", *KINDS)]
    assert sizes == [2 * sizes[1], sizes[1], sizes[1]]


def add_scales(folder: Path, target: Path, scales: dict[str, Any]) -> Path:
    """A checkpoint with more tensors, of layers that are named by their number alone."""
    make_tiny_model(target)
    weights = load_file(folder / "model.safetensors")
    weights |= {f"model.layers.{name}": torch.tensor(scale) for name, scale in scales.items()}
    save_file(weights, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_scales_of_a_checkpoint_are_taken(
    keys: str, values: str, folder: Path, tmp_path: Path, engine: Callable[..., LLM]
) -> None:
    """Of one head each, or of all; other layers are measured, and a plain cache needs none."""
    given = {f"0.{keys}": 0.25, f"0.{values}": [[[0.5]], [[0.125]]]}
    model = add_scales(folder, tmp_path / "model", given)
    measured = scales(engine(kv_cache_dtype="fp8"))
    found = scales(engine(model=model, kv_cache_dtype="fp8"))
    assert found[0].tolist() == [[0.25, 0.25], [0.5, 0.125]]
    assert torch.equal(found[1], measured[1])
    assert scales(engine(model=model, kv_cache_dtype="int8"))[0][0, 0] == pytest.approx(0.25 * 448 / 127)
    assert tokens(engine(model=model).generate(PROMPTS, GREEDY)) == tokens(engine().generate(PROMPTS, GREEDY))


def test_a_rank_takes_the_scales_of_its_heads(folder: Path, tmp_path: Path) -> None:
    given = {"0.self_attn.k_scale": 0.25, "0.self_attn.v_scale": [0.5, 0.125]}
    model = add_scales(folder, tmp_path / "model", given)
    described, spec = read_config(model), spec_of(model)
    for rank, size, expected in ((0, 2, 0.5), (1, 2, 0.125), (1, 4, 0.5), (2, 4, 0.125)):
        first, second = stored_scales(model, described, spec, 448.0, Ranks(rank, size))
        assert first is not None and first.tolist() == [[0.25], [expected]]
        assert second is None


def test_scales_of_integers_are_told_by_the_scheme(folder: Path, tmp_path: Path) -> None:
    model = add_scales(folder, tmp_path / "model", {"1.self_attn.k_scale": [0.5], "1.self_attn.v_scale": [1.0]})
    config = read_config(model) | {"quantization_config": {"kv_cache_scheme": {"type": "int", "num_bits": 8}}}
    first, second = stored_scales(model, config, spec_of(model), 127.0)
    assert first is None and second is not None and second.tolist() == [[0.5, 0.5], [1.0, 1.0]]


def spec_of(model: Path) -> ModelSpec:
    return spec_from_config(read_config(model))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"0.self_attn.k_scale": 0.0, "0.self_attn.v_scale": 1.0}, r"k_scale has the scale 0\.0"),
        ({"0.self_attn.k_scale": 1.0, "0.self_attn.v_scale": -0.5}, r"v_scale has the scale -0\.5"),
        ({"1.self_attn.k_scale": [1.0, float("nan")], "1.self_attn.v_scale": 1.0}, "k_scale has the scale nan"),
        ({"0.self_attn.k_scale": [1.0] * 3, "0.self_attn.v_scale": 1.0}, r"3 scales \[3\].* of the layer's 2 KV heads"),
        ({"1.self_attn.v_scale": 1.0}, "v_scale of layer 1, and no k_scale"),
    ],
    ids=str,
)
def test_scales_that_are_refused(
    given: dict[str, Any], reason: str, folder: Path, tmp_path: Path, engine: Callable[..., LLM]
) -> None:
    model = add_scales(folder, tmp_path / "model", given)
    with pytest.raises(CorruptCheckpoint, match=reason) as caught:
        engine(model=model, kv_cache_dtype="fp8")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["fp8_e5m2", "int4", "nvfp4"])
def test_formats_that_are_refused(name: str, engine: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype {name} is refused: .*is one of auto, .*fp8, int8"):
        engine(kv_cache_dtype=name)


@pytest.mark.parametrize("dtype", KINDS.values(), ids=str)
def test_codes_are_the_nearest(dtype: torch.dtype) -> None:
    scale = torch.tensor([0.25, 2.0])
    numbers = torch.tensor([0.0, -0.0, 0.1, -3.7, 1e9, -1e9]).view(-1, 1, 1).expand(-1, 2, 4) * scale[:, None]
    found = codes_of(numbers, scale, dtype).float()[:, 0, 0].tolist()
    largest = LARGEST_CODE[dtype]
    rounded = [0.1015625, -3.75] if dtype.is_floating_point else [0.0, -4.0]
    assert found == [0.0, 0.0, *rounded, largest, -largest]
