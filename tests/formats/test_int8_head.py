"""Plain output layers that become INT8 while they are loaded, with the embeddings where both are one matrix."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.formats.method import QuantizedMethod
from kvern.layers.unquantized import CompiledMethod, UnquantizedMethod
from kvern.models.fallback import swap
from kvern.models.fallback.decoder import load_fallback
from kvern.models.fallback.description import describe
from kvern.models.loader import LoadOptions, load_model
from kvern.planning.choice import model_of
from kvern.ranks.ranks import Ranks
from kvern.runner.plan import CPU_KERNELS
from tests.support.cache_folder import load_kernels
from tests.support.encoders import make_encoder
from tests.support.families import make_checkpoint
from tests.support.gguf_files import WITHOUT_TOKENIZER, write_gguf

SIZES = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 32, "vocab_size": 331}


def make_folder(folder: Path, **changes: Any) -> Path:
    return make_checkpoint("llama", folder, **SIZES | changes)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("compiled", [True, False])
def test_scores_are_near_those_of_plain_weights(compiled: bool, dtype: str, tied: bool, tmp_path: Path) -> None:
    if compiled:
        load_kernels("cpu_packed", 1)
    folder = make_folder(tmp_path, tie_word_embeddings=tied)
    plain = load_model(folder, LoadOptions("float32"))
    kernels = frozenset(CPU_KERNELS if compiled else ())
    found = load_model(folder, LoadOptions(dtype, kernels=kernels, int8_head=True))
    head, embeddings = found.lm_head.method, found.embed_tokens.method
    assert isinstance(head, QuantizedMethod) and head.codes.dtype == torch.int8 and head.compiled == compiled
    assert (head is embeddings) == tied and embeddings.looks_up == compiled
    assert isinstance(found.layers[0].mlp.down_proj.method, CompiledMethod | UnquantizedMethod), "layers stay plain"
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).to(plain.build.dtype)
    expected, scores = plain.lm_head.scores(x), found.lm_head.scores(x.to(found.build.dtype))
    assert scores.dtype == torch.float32
    assert 1e-4 < (scores - expected).norm() / expected.norm() < 0.012
    ids = torch.tensor([0, 330, 17, 17])
    rows, exact = found.embed_tokens(ids).float(), plain.embed_tokens(ids)
    step = exact.abs().amax(1, keepdim=True) / 127 if tied else 0
    assert ((rows - exact).abs() <= 0.5 * step + 0.005 * exact.abs()).all()
    if tied:
        assert torch.equal(rows, head.dequantize()[ids].float())


def test_compiled_scores_are_not_rounded_to_sixteen_bits(tmp_path: Path) -> None:
    load_kernels("cpu_packed", 1)
    found = load_model(make_folder(tmp_path), LoadOptions("bfloat16", kernels=CPU_KERNELS, int8_head=True))
    scores = found.lm_head.scores(torch.ones(1, 96, dtype=torch.bfloat16))
    assert not torch.equal(scores, scores.bfloat16().float())


def test_shares_of_ranks_have_the_rows_of_the_whole(tmp_path: Path) -> None:
    load_kernels("cpu_packed", 1)
    folder = make_folder(tmp_path, tie_word_embeddings=True)
    options = LoadOptions("bfloat16", kernels=CPU_KERNELS, int8_head=True)
    whole = load_model(folder, options).lm_head.method
    shares = [load_model(folder, replace(options, ranks=Ranks(rank, 2))) for rank in range(2)]
    ids = torch.arange(331)
    held = [share.lm_head.held for share in shares]
    assert [*held[0], *held[1]] == ids.tolist()
    parts = [share.lm_head.method.embed_share(ids, rows) for share, rows in zip(shares, held, strict=True)]
    assert torch.equal(sum(parts), whole.embed(ids))
    assert not parts[0][held[1].start :].any() and not parts[1][: held[1].start].any()


def test_tables_of_layer_inputs_stay_plain(tmp_path: Path) -> None:
    """Nothing is multiplied by them, and the option is for the matrix of the output layer."""
    folder = make_checkpoint("gemma3n", tmp_path)
    plain, found = (load_model(folder, LoadOptions("float32", int8_head=int8)) for int8 in (False, True))
    assert isinstance(found.lm_head.method, QuantizedMethod) and found.lm_head.method is found.embed_tokens.method
    assert plain.per_layer is not None and found.per_layer is not None
    ids = torch.arange(8)
    assert torch.equal(found.per_layer.table(ids), plain.per_layer.table(ids))


def test_an_encoder_has_no_output_layer(tmp_path: Path) -> None:
    folder = make_encoder("bert", tmp_path)
    with pytest.raises(ConfigError, match=r"^head_quantization int8 .* it has no output layer: leave"):
        LLM(str(folder), head_quantization="int8", dtype="float32", threads=1)


@pytest.mark.parametrize(
    ("options", "device", "draft", "expected"),
    [
        ({"quantization": "int4"}, "cpu", False, True),
        ({"quantization": "int8"}, "cpu", False, True),
        ({"quantization": "int4"}, "cuda", False, False),
        ({"quantization": "fp8"}, "cpu", False, False),
        ({}, "cpu", False, False),
        ({"quantization": "int4", "head_quantization": "none"}, "cpu", False, False),
        ({"head_quantization": "int8"}, "cuda", False, True),
        ({"head_quantization": "int8", "draft_model": "other"}, "cpu", True, False),
        ({"draft_quantization": "int8", "draft_model": "other"}, "cpu", True, True),
    ],
)
def test_who_has_one(options: dict[str, Any], device: str, draft: bool, expected: bool) -> None:
    assert EngineConfig("model", **options).has_int8_head(device, draft=draft) is expected


def test_four_bits_on_a_cpu_have_one_unless_it_is_refused(tmp_path: Path) -> None:
    """The rest of the model is the same, and estimates of its steps count fewer bytes."""
    folder = make_folder(tmp_path, tie_word_embeddings=False)
    formats, sizes = [], []
    for given in ("auto", "none"):
        config = EngineConfig(str(folder), device="cpu", quantization="int4", head_quantization=given)
        shares = {share.kind: share for share in model_of(config, folder).shares}
        formats.append(shares.pop("output layer").format)
        sizes.append({kind: share.nbytes for kind, share in shares.items()})
    assert formats == ["int8 by row", "bfloat16" if "bfloat16" in formats else "float32"]
    assert sizes[0] == sizes[1]


def test_one_that_is_stored_quantized_is_refused(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model")
    file = write_gguf(model, tmp_path, "Q8_0").file
    with pytest.raises(ConfigError, match=r"^head_quantization is int8, but .* is stored quantized: leave"):
        LLM(str(file), tokenizer=WITHOUT_TOKENIZER, head_quantization="int8", dtype="float32", threads=1)


@pytest.mark.parametrize("is_odd", [False, True])
def test_an_output_layer_that_transformers_computes_stays_plain_and_says_so(
    is_odd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint("apertus", tmp_path)
    monkeypatch.setattr(swap, "has_hooks", lambda module: is_odd and getattr(module, "out_features", 0) == 131)
    load_fallback(folder, describe(folder), torch.float32, LoadOptions(int8_head=True))
    assert ("the output layer of apertus stays plain" in caplog.text) == is_odd


def test_models_of_transformers_have_one(tmp_path: Path) -> None:
    folder = make_checkpoint("apertus", tmp_path)
    options = {"dtype": "float32", "threads": 1, "kv_cache_tokens": 256}
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)
    answers = []
    for given in ("none", "int8"):
        with LLM(str(folder), head_quantization=given, **options) as llm:
            [output] = llm.generate([[5, 6, 7]], params)
        [entry] = output.outputs[0].logprobs or []
        answers.append({token: item.logprob for token, item in entry.items()})
    plain, found = answers
    common = plain.keys() & found.keys()
    assert common
    assert 0 < max(abs(plain[token] - found[token]) for token in common) < 0.05
