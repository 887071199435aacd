"""Parts of a model of transformers that kvern computes: which ones are found alike, and which are given back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from kvern import LLM, SamplingParams
from kvern.models.fallback import description, swap
from kvern.models.fallback.decoder import TransformersDecoder, load_fallback
from kvern.models.fallback.likeness import like_embedding, like_mlp, like_norm
from kvern.models.fallback.parts import SwappedEmbedding, SwappedLinear, SwappedMlp, SwappedNorm
from kvern.models.loader import LoadOptions
from kvern.runner.fallback_check import check_fallback
from kvern.spec.model import Activation, NormSpec
from tests.support.families import make_checkpoint, reference_logits

OPTIONS: dict[str, Any] = {"threads": 1, "max_model_len": 64, "kv_cache_tokens": 128, "block_size": 4}


class LateEpsilon(nn.Module):
    """A norm that adds its epsilon after the root."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


@pytest.mark.parametrize(
    ("norm", "spec"),
    [
        (LlamaRMSNorm(16, eps=1e-5), NormSpec("rms", 1e-5)),
        (GemmaRMSNorm(16, eps=1e-6), NormSpec("rms", 1e-6, 1.0)),
        (nn.LayerNorm(16, eps=1e-5), NormSpec("layer", 1e-5, bias=True)),
        (nn.LayerNorm(16, eps=1e-3, bias=False), NormSpec("layer", 1e-3)),
        (LateEpsilon(), None),
        (nn.Linear(16, 16), None),
        (nn.SiLU(), None),
    ],
)
def test_a_norm_is_found_by_what_it_computes(norm: nn.Module, spec: NormSpec | None) -> None:
    assert like_norm(norm) == spec


class Mlp(nn.Module):
    """A gated MLP, or a plain one, whose matrices have other names than usual."""

    def __init__(self, activation: nn.Module, form: str, bias: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.form, self.factor, self.act = form, factor, activation
        self.one = nn.Linear(8, 48 if "joined" in form else 24, bias=bias)
        if form == "gated":
            self.two = nn.Linear(8, 24, bias=bias)
        self.three = nn.Linear(24, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.one(x), None
        if self.form == "gated":
            second = self.two(x)
        elif "joined" in self.form:
            first, second = first.chunk(2, -1)
        if self.form.endswith("late gate"):
            first, second = second, first
        hidden = self.act(first) if second is None else self.act(first) * second
        out: Tensor = self.three(hidden) * self.factor
        return out


MLPS: list[tuple[Mlp, Activation | None]] = [
    (Mlp(nn.SiLU(), "gated"), "silu"),
    (Mlp(nn.GELU(), "gated", bias=True), "gelu"),
    (Mlp(nn.GELU("tanh"), "joined"), "gelu_tanh"),
    (Mlp(nn.SiLU(), "joined, late gate", bias=True), "silu"),
    (Mlp(nn.ReLU(), "plain", bias=True), "relu"),
    (Mlp(nn.SiLU(), "gated", factor=1.001), None),
    (Mlp(nn.Mish(), "gated"), None),
]


@pytest.mark.parametrize(("mlp", "activation"), MLPS)
def test_an_mlp_is_found_by_what_it_computes_and_computed(mlp: Mlp, activation: Activation | None) -> None:
    found = like_mlp(mlp)
    assert activation == (None if found is None else found.spec.activation)
    if found is None:
        return
    assert found.spec.gated == (mlp.form != "plain")
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = mlp(x)
        part = SwappedMlp(mlp, found, build(), *(swap.Switch("mlp"), swap.Switch("linear")))
        for mlp_on, linear_on in ((True, True), (False, True), (False, False)):
            part.switch.on, part.linears.on = mlp_on, linear_on
            torch.testing.assert_close(part(x), expected, atol=1e-6, rtol=1e-5)


def build() -> Any:
    from kvern.layers.build import Build

    return Build(torch.float32, torch.device("cpu"), 64)


def test_a_factor_of_embeddings_is_found() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 3.5

    class Shifted(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + 1

    assert like_embedding(nn.Embedding(9, 8)) == 1.0
    assert like_embedding(Scaled(9, 8)) == 3.5
    assert like_embedding(Shifted(9, 8)) is None


def parts_of(decoder: TransformersDecoder) -> dict[type, int]:
    kinds = SwappedLinear, SwappedNorm, SwappedMlp
    return {kind: sum(isinstance(module, kind) for module in decoder.model.modules()) for kind in kinds}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(family, folder / family) for family in ("apertus", "llama", "gpt2")}


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> TransformersDecoder:
    return load_fallback(folder, description.describe(folder), dtype, LoadOptions(**options))


def test_kvern_computes_the_parts_of_a_model(models: dict[str, Path]) -> None:
    found = parts_of(loaded(models["llama"]))
    assert found == {SwappedLinear: 4 * 3 + 1, SwappedNorm: 2 * 3 + 1, SwappedMlp: 3}
    assert parts_of(loaded(models["gpt2"]))[SwappedLinear] == 4 * 3 + 1  # its matrices lie the other way


def test_what_differs_is_given_back_to_transformers(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A norm with an offset is planted where there is none."""
    monkeypatch.setattr(swap, "like_norm", lambda module: _offset(like_norm(module)))
    decoder = loaded(models["llama"])
    check_fallback(decoder, 64, torch.float32)
    assert decoder.swaps.kinds == ["linear layers", "LlamaMLP"]
    assert parts_of(decoder)[SwappedNorm] == 0 and parts_of(decoder)[SwappedMlp] == 3
    assert "transformers computes LlamaRMSNorm of llama, with which kvern's differ" in caplog.text


def _offset(spec: NormSpec | None) -> NormSpec | None:
    return None if spec is None else NormSpec(spec.kind, spec.epsilon, 1.0)


def test_parts_that_raise_are_given_back(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.switch.on:
            raise RuntimeError("planted")
        return F.linear(x, self.weight, self.bias)

    monkeypatch.setattr(SwappedLinear, "forward", forward)
    decoder = loaded(models["llama"])
    check_fallback(decoder, 64, torch.float32)
    assert "linear layers" not in decoder.swaps.kinds and parts_of(decoder)[SwappedLinear] == 0
    monkeypatch.undo()
    own = torch.arange(3, 20)
    with torch.inference_mode():
        torch.testing.assert_close(decoder.plain_logits(own), reference_logits(models["llama"], own.tolist()))


def test_the_head_is_given_back_too(models: dict[str, Path]) -> None:
    decoder = loaded(models["llama"])
    decoder.settle([])
    for model in (decoder.model, decoder._head):
        assert not any(isinstance(part, SwappedLinear | SwappedNorm | SwappedMlp) for part in model.modules())


def test_a_table_is_given_back(tmp_path: Path) -> None:
    folder = make_checkpoint("gemma2", tmp_path)
    decoder = loaded(folder)
    table = decoder.model.get_input_embeddings()
    assert isinstance(table, SwappedEmbedding) and table.num_embeddings == decoder.spec.vocab_size
    ids = torch.arange(3, 20)
    wanted = table(ids)
    table.switch.on = False
    torch.testing.assert_close(table(ids), wanted)
    decoder.settle([])
    plain = decoder.model.get_input_embeddings()
    assert isinstance(plain, nn.Embedding) and plain.padding_idx == table.padding_idx
    torch.testing.assert_close(plain(ids), wanted)
    with torch.inference_mode():
        torch.testing.assert_close(decoder.plain_logits(ids), reference_logits(folder, ids.tolist()))


def test_limits_are_seen() -> None:
    class LimitedNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states.clamp(-50, 50))

    class LimitedMlp(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.three(self.act(self.one(x).clamp(max=7)) * self.two(x).clamp(-7, 7))
            return out

    assert like_norm(LimitedNorm(16)) is None
    assert like_mlp(LimitedMlp(nn.SiLU(), "gated")) is None


def test_modules_with_hooks_stay(models: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(models["llama"], dtype=torch.float32)
    layers = model.model.layers
    layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    layers[1].input_layernorm.register_forward_pre_hook(lambda *_: None)
    with torch.no_grad():
        swap.Swaps(model, build(), None, None)
    assert isinstance(layers[0].mlp, LlamaMLP) and type(layers[0].mlp.up_proj) is nn.Linear
    assert isinstance(layers[0].mlp.down_proj, SwappedLinear) and isinstance(layers[1].mlp, SwappedMlp)
    assert isinstance(layers[1].input_layernorm, LlamaRMSNorm)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantized_while_loaded_it_answers_as_kverns_own_model(quantization: str, models: dict[str, Path]) -> None:
    prompt, found = list(range(3, 20)), []
    for implementation in ("kvern", "transformers"):
        options = OPTIONS | {"quantization": quantization, "model_implementation": implementation}
        with LLM(str(models["llama"]), **options) as llm:
            [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, logprobs=100))
        [entry] = output.outputs[0].logprobs or []
        found.append({token: item.logprob for token, item in entry.items()})
    plain = reference_logits(models["llama"], prompt)[-1].log_softmax(-1)
    both = found[0].keys() & found[1].keys()
    off = sum((found[1][token] - found[0][token]) ** 2 for token in both)
    lost = sum((found[1][token] - float(plain[token])) ** 2 for token in both)
    assert len(both) > 90 and 0 <= off < 0.01 * lost


def test_rows_that_products_round_are_no_fault() -> None:
    """With FP8 the same prompt in other parts has logits that are further off than those of plain weights may be."""
    found = []
    for implementation in ("kvern", "transformers"):
        options = OPTIONS | {"dtype": "bfloat16", "quantization": "fp8", "model_implementation": implementation}
        with LLM("kvern-12m", **options) as llm:
            found.append(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=1)))
    assert found[0][0].outputs[0].token_ids == found[1][0].outputs[0].token_ids
