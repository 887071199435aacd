"""Models without a description run through transformers over kvern's cache, or are refused by name."""

import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvern import LLM, SamplingParams
from kvern.config import EngineConfig
from kvern.errors import ConfigError, CorruptCheckpoint, UnsupportedModel
from kvern.models.fallback import description
from kvern.models.fallback.decoder import load_fallback
from kvern.models.implementation import describe_model
from kvern.models.loader import LoadOptions, read_config
from kvern.models.registry import is_described
from kvern.runner.fallback_check import check_fallback, check_fallback_options
from kvern.runner.memory import DeviceMemory
from tests.support.fallback_families import FALLBACKS
from tests.support.families import make_checkpoint, reference_greedy, reference_logits
from tests.support.idle import is_idle
from tests.support.internals import core_of, decoder_of
from tests.support.served import serving

TOLERANCE = 1e-4
OUTPUT = 8
OPTIONS: dict[str, Any] = {
    "model_implementation": "transformers",
    "threads": 1,
    "max_model_len": 64,
    "block_size": 4,
    "max_batch_requests": 4,
    "max_batch_tokens": 11,
}
BY_DAY = ("gpt2", "vaultgemma", "mimo_v2_flash")


def prompts() -> list[list[int]]:
    """Some begin alike, one is another's beginning, and three have nothing in common, nor room beside each other."""
    dice = random.Random(3)
    head = [dice.randrange(3, 131) for _ in range(18)]
    tails = [[dice.randrange(3, 131) for _ in range(length)] for length in (1, 9, 20, 14)]
    others = [[dice.randrange(3, 131) for _ in range(length)] for length in (13, 14, 15)]
    return [*(head + tail for tail in tails), head[:5], *others]


def check(llm: LLM, folder: Path, asked: list[list[int]], n: int) -> None:
    """Each answer is the most likely, and its log-probabilities are those of the model's own forward pass."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, logprobs=100, n=n)
    for prompt, output in zip(asked, llm.generate(asked, params), strict=True):
        assert len(output.outputs) == n
        for answer in output.outputs:
            expected = reference_logits(folder, prompt + answer.token_ids).log_softmax(-1)[len(prompt) - 1 : -1]
            assert answer.token_ids == expected.argmax(-1).tolist()
            assert answer.logprobs is not None
            for entry, row in zip(answer.logprobs, expected, strict=True):
                found = torch.tensor([item.logprob for item in entry.values()])
                torch.testing.assert_close(found, row[torch.tensor(list(entry))], atol=TOLERANCE, rtol=0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("cpu_kernels", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly)
        for name in [*FALLBACKS, "mistral", "gemma3", "qwen3_moe"]
    ],
)
def test_chunks_preemptions_hits_and_samples_give_what_the_model_gives(
    family: str, cpu_kernels: bool, tmp_path: Path
) -> None:
    folder, asked = make_checkpoint(family, tmp_path), prompts()
    dice = random.Random(5)
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=64, cpu_kernels=cpu_kernels) as llm:
        for budget, n in ((4, 1), (7, 2), (11, 1)):
            core_of(llm).scheduler.limits = core_of(llm).scheduler.limits.__class__(budget, 4, 100)
            check(llm, folder, dice.sample(asked, len(asked)), n)
        roomy = core_of(llm).scheduler.cache.extensions != []  # windows leave room for all of them
        assert (llm.statistics().preemptions > 0 or roomy) and llm.statistics().cached_tokens > 0
        assert is_idle(llm)


@pytest.fixture(scope="module")
def apertus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("apertus", tmp_path_factory.mktemp("apertus"))


def test_a_model_without_a_description_runs_by_itself_and_says_so(
    apertus: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = OPTIONS | {"model_implementation": "auto", "kv_cache": "contiguous", "prefix_cache": False}
    with LLM(str(apertus), **options, kv_cache_tokens=256) as llm:
        check(llm, apertus, prompts(), 1)
    [said] = [record.getMessage() for record in caplog.records if "transformers" in record.getMessage()]
    assert "computes apertus, which kvern has no description of (kvern describe may find one): slower" in said
    assert "shards" not in capfd.readouterr().err
    with pytest.raises(UnsupportedModel, match="architecture ApertusForCausalLM / apertus is unknown"):
        describe_model(apertus, read_config(apertus), "kvern")


def test_a_model_with_a_description_is_computed_by_kvern(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    assert describe_model(folder, read_config(folder), "auto").layers
    assert not describe_model(folder, read_config(folder), "transformers").layers


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_cache_in_8_bits_stays_near(apertus: Path, kv_cache_dtype: str) -> None:
    [prompt] = prompts()[2:3]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=100)
    with LLM(str(apertus), **OPTIONS, kv_cache_tokens=256, kv_cache_dtype=kv_cache_dtype) as llm:
        [output] = llm.generate([prompt], params)
    expected = reference_logits(apertus, prompt)[-1].log_softmax(-1)
    [entry] = output.outputs[0].logprobs or []
    off = torch.tensor([item.logprob - float(expected[token]) for token, item in entry.items()])
    assert TOLERANCE < off.abs().max() < 0.2 * expected.std()


def test_embeddings_are_the_last_states(apertus: Path, tmp_path: Path) -> None:
    [prompt] = prompts()[1:2]
    folder = Path(shutil.copytree(apertus, tmp_path / "model"))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=256) as llm:
        [[found]] = [llm.embed([prompt])]
    model = AutoModelForCausalLM.from_pretrained(apertus).eval()
    with torch.inference_mode():
        state = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    torch.testing.assert_close(torch.tensor(found), state / state.norm(), atol=1e-5, rtol=0)


def test_random_weights_need_no_files(apertus: Path, tmp_path: Path) -> None:
    shutil.copy(apertus / "config.json", tmp_path)
    with LLM(str(tmp_path), **OPTIONS, kv_cache_tokens=256, load_format="dummy") as llm:
        assert len(llm.generate([[3, 4]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "states": ("rwkv", {}, "its layers keep states of their own"),
    "convolutions": (
        "lfm2",
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        "it has layers of the types conv",
    ),
    "state space layers": ("bamba", {}, "it has layers of the types|its layers keep states"),
    "an encoder": ("bart", {}, "it has an encoder"),
    "both directions": ("bert", {}, "it attends in both directions"),
    "fixed attention": ("falcon", {}, "its attention cannot be replaced"),
    "masks of its own": ("doge", {"num_experts": 64}, "it makes an attention mask of its own"),
    "chunks": ("llama4_text", {}, "it has layers of the types chunked_attention"),
    "shared keys": ("apertus", {"num_kv_shared_layers": 1}, "layers share the keys and values of others"),
    "quantized weights": ("apertus", {"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized"),
    "unused window": ("apertus", {"sliding_window": 9}, "called with a window of None, and config.json says 9"),
    "choices by numbers": ("jetmoe", {}, "it does not run without its weights"),
    "no causal model": ("vit", {}, "transformers has no causal language model of this type"),
    "settings": ("apertus", {"num_attention_heads": 0}, "num_attention_heads is 0: it must be a whole number above 0"),
    "sizes": ("gpt2", {"n_layer": 10**9}, "in config.json num_hidden_layers is 1000000000: it must be"),
    "unknown": ("nobodys", {}, "transformers cannot read config.json: ValueError"),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_run_is_refused_by_name(why: str, tmp_path: Path) -> None:
    model_type, fields, message = REFUSED[why]
    if model_type == "nobodys":
        (tmp_path / "config.json").write_text('{"model_type": "nobodys", "auto_map": {"AutoConfig": "code.Config"}}')
        (tmp_path / "code.py").write_text("raise SystemExit('code of the model was run')")
    else:
        quantization = {key: fields[key] for key in fields if key == "quantization_config"}
        config = AutoConfig.for_model(model_type, **{key: fields[key] for key in fields if key not in quantization})
        for key, value in quantization.items():
            setattr(config, key, value)
        config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message) as caught:
        describe_model(tmp_path, read_config(tmp_path), "transformers")
    described = is_described({"model_type": model_type})
    assert "\n" not in str(caught.value)
    assert ("kvern has no description of this model" in str(caught.value)) != described
    assert model_type == "nobodys" or f"{model_type} cannot run through transformers: " in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_adapters": 2}, "max_adapters 2 does not go with apertus, which transformers computes"),
        ({"deterministic": True}, "deterministic does not go with apertus"),
    ],
)
def test_options_that_are_of_kverns_own_layers_are_refused(
    apertus: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(apertus), **OPTIONS | options)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tied_embeddings_in_16_bits(family: str, tmp_path: Path) -> None:
    """Results are compared within what 16 bits round, and all parts stay kvern's."""
    tied = {} if family == "gpt2" else {"tie_word_embeddings": True}
    folder = make_checkpoint(family, tmp_path, **tied)
    options = OPTIONS | {"dtype": "bfloat16", "kv_cache_tokens": 64}
    with LLM(str(folder), device="cpu", **options) as llm:
        assert {"embeddings", "linear layers"} <= set(decoder_of(llm).swaps.kinds)
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 4


def test_too_little_memory_is_refused(apertus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, memory = description.describe(apertus), DeviceMemory(torch.device("cpu"))
    check_fallback_options(EngineConfig(), spec, torch.float32, memory)
    large = replace(spec, parameters=10**18)
    with pytest.raises(ConfigError, match=r"4000000000.0 GB in float32, and this machine has \d+.\d GB: use a smaller"):
        check_fallback_options(EngineConfig(), large, torch.float32, memory)
    memory.device, memory.share = torch.device("cuda"), 0.5
    monkeypatch.setattr(memory, "free_and_total", lambda: (8 << 30, 16 << 30))
    check_fallback_options(EngineConfig(), spec, torch.float32, memory)
    config = EngineConfig(quantization="int4")
    with pytest.raises(ConfigError, match=r"they are quantized, and free on the GPU within gpu_memory_share 0.5"):
        check_fallback_options(config, large, torch.float32, memory)
    monkeypatch.setattr(memory, "free_and_total", lambda: (1 << 80, 1 << 80))
    with pytest.raises(ConfigError, match="transformers loads them into the machine's memory first, of which are free"):
        check_fallback_options(config, large, torch.float32, memory)


@pytest.mark.parametrize("kind", ["missing", "unexpected", "mismatched"])
def test_weights_that_do_not_fit_are_refused(kind: str, apertus: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(apertus, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    if kind != "unexpected":
        tensor = tensors.pop("model.norm.weight")
    if kind != "missing":
        tensors["model.other.weight" if kind == "unexpected" else "model.norm.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptCheckpoint, match=r"other\.weight" if kind == "unexpected" else r"norm\.weight"):
        load_fallback(folder, description.describe(folder), torch.float32)
    assert kind == "unexpected" or tensor.dim() == 1


def test_pickled_weights_are_not_read(apertus: Path, tmp_path: Path) -> None:
    shutil.copy(apertus / "config.json", tmp_path)
    torch.save(load_file(apertus / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(CorruptCheckpoint, match="transformers cannot load the weights"):
        load_fallback(tmp_path, description.describe(tmp_path), torch.float32)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "int4"), (torch.bfloat16, "fp8")],
)
def test_a_model_that_counts_positions_by_itself_fails_the_check(
    dtype: torch.dtype, quantization: Literal["int4", "fp8"] | None, apertus: Path
) -> None:
    options = LoadOptions(quantization=quantization)
    decoder = load_fallback(apertus, description.describe(apertus), dtype, options)
    check_fallback(decoder, 64, dtype)

    def without_positions(module: Any, arguments: Any, named: dict[str, Any]) -> Any:
        return arguments, named | {"position_ids": None}

    decoder.model.base_model.register_forward_pre_hook(without_positions, with_kwargs=True)
    message = r"apertus cannot run through transformers: over a cache its logits are off by .* it may keep a state, or"
    with pytest.raises(UnsupportedModel, match=message):
        check_fallback(decoder, 64, dtype)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["apertus", "vaultgemma", "hy_v3"])
def test_the_check_bears_16_bits(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    decoder = load_fallback(folder, description.describe(folder), dtype)
    check_fallback(decoder, 64, torch.float32 if dtype == torch.float16 else dtype)


def test_rotations_that_depend_on_a_batch_end_at_the_original_context(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    folder = make_checkpoint("llama", tmp_path, head_dim=16, rope_parameters=rope)
    with pytest.raises(ConfigError, match="max_model_len is 64, above the model's 32"):
        LLM(str(folder), **OPTIONS)
    with LLM(str(folder), **OPTIONS | {"max_model_len": 32, "kv_cache_tokens": 64}) as llm:
        check(llm, folder, prompts()[-2:], 1)


def test_without_the_package(apertus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'kvern[transformers]'")):
        LLM(str(apertus), **OPTIONS)
    with pytest.raises(UnsupportedModel, match=re.escape("may be able to run it: pip install 'kvern[transformers]'")):
        LLM(str(apertus), **OPTIONS | {"model_implementation": "auto"})


@pytest.mark.nightly
def test_it_is_served(tiny_model: Path, tmp_path: Path) -> None:
    folder = make_checkpoint("apertus", tmp_path, vocab_size=288, eos_token_id=1)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, folder)
    prompt = [5, 6, 7, 8]
    with serving(str(folder)) as served:
        answer = served.client().completions.create(
            model=str(folder), prompt=prompt, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
        )
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    with LLM(str(folder), max_model_len=64, kv_cache_tokens=128) as llm:
        [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert output.outputs[0].token_ids == reference_greedy(folder, prompt, 4)
    assert answer.choices[0].text == output.outputs[0].text
