"""Formats of weights in the engine whose batch lives on the device: what they cannot fuse is done in parts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvern import LLM, SamplingParams
from kvern.layers.fused import FusedLayer
from tests.support.drafting_requests import PROMPTS
from tests.support.families import make_checkpoint
from tests.support.internals import decoder_of
from tests.support.kernels.device_engines import OPTIONS
from tests.support.outputs import chosen_logprobs, token_ids
from tests.support.peft_adapters import make_adapter
from tests.support.scaled_rows import quantize

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=1)


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        pytest.param("llama3", ".", marks=pytest.mark.nightly),
        ("llama", r"layers\.1\.mlp"),
        pytest.param("mixtral", "experts|mlp.gate$", marks=pytest.mark.nightly),
    ],
    ids=["tied", "some", "experts"],
)
def test_answers_are_those_of_the_rounded_model(
    family: str, layers: str, tmp_path: Path, on_device: Callable[..., LLM]
) -> None:
    made = quantize(make_checkpoint(family, tmp_path / "model"), tmp_path, layers)
    expected = LLM(str(made.rounded), device="cpu", **OPTIONS).generate(PROMPTS, PARAMS)
    llm = on_device(made.quantized, **OPTIONS)
    found = llm.generate(PROMPTS, PARAMS)
    assert token_ids(found) == token_ids(expected)
    assert list(chosen_logprobs(found)) == pytest.approx(list(chosen_logprobs(expected)), abs=2e-4)
    alone = llm.generate(PROMPTS[:1], PARAMS)  # steps of a single token
    assert token_ids(alone) == token_ids(expected)[:1]


def test_layers_whose_format_cannot_fuse_run_in_parts(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = quantize(make_checkpoint("llama", tmp_path / "model"), tmp_path, r"layers\.1\.mlp")
    llm = on_device(made.quantized, **OPTIONS)
    layers = list(decoder_of(llm).layers)
    assert all(isinstance(layer, FusedLayer) for layer in layers)
    in_parts = []
    forward = FusedLayer._many_rows

    def record(self: FusedLayer, hidden: object, *arguments: object) -> object:
        in_parts.append((layers.index(self), hidden.shape[0]))  # type: ignore[attr-defined]
        return forward(self, hidden, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FusedLayer, "_many_rows", record)
    llm.generate(PROMPTS[:1], PARAMS)
    assert {layer for layer, rows in in_parts if rows == 1} == {1}
    assert {layer for layer, rows in in_parts if rows > 1} == {0, 1, 2}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters(tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    model = make_checkpoint("llama", tmp_path / "model")
    made, adapter = quantize(model, tmp_path, "."), make_adapter(model, tmp_path / "one", 1, r=3)
    options = OPTIONS | {"max_adapters": 1, "max_adapter_rank": 16, "adapters": {"one": str(adapter)}}
    names = ["one", None, "one"]
    expected = LLM(str(made.rounded), device="cpu", **options).generate(PROMPTS, PARAMS, adapter=names)
    found = on_device(made.quantized, **options).generate(PROMPTS, PARAMS, adapter=names)
    assert token_ids(found) == token_ids(expected)
    assert list(chosen_logprobs(found)) == pytest.approx(list(chosen_logprobs(expected)), abs=2e-4)
