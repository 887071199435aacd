"""Numbers of kernels beside PyTorch's at a start, with Triton's interpreter: right ones agree, wrong ones are found."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from kvern.bench.kernels import methods_of
from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.formats.scaled import ScaledMethod
from kvern.kernels import delta_net
from kvern.kernels.groups import MODEL_GROUPS, NVIDIA_GROUPS, group_of
from kvern.layers import tuned_linear
from kvern.layers.build import Build
from kvern.layers.linear import Linear
from kvern.layers.linear_format import LinearMethods, linear_methods
from kvern.layers.tuned_linear import TunedLinear
from kvern.layers.tuning import tune
from kvern.models.decoder import Decoder
from kvern.models.fallback.spec import TransformersSpec
from kvern.models.loader import fill_random
from kvern.runner import kernel_numbers
from kvern.runner.kernel_choice import usable_kernels
from kvern.runner.kernel_numbers import Comparison, Model, few_layers, wrong_groups
from kvern.runner.loaded_model import Stored
from kvern.runner.startup import Startup
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import ModelSpec
from tests.kernels.models import NETS, TINY, TINY_ENCODERS, TINY_MODELS, spec_of

pytestmark = [
    pytest.mark.usefixtures("few_products"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are made wrong in the interpreter"),
]
CPU = torch.device("cpu")
GROUPS = frozenset(name for name in MODEL_GROUPS - NVIDIA_GROUPS if not name.startswith("hopper"))
USED = frozenset({"activation", "attention", "batch", "few_rows", "linear", "norm", "rotary", "sampling"})
"""The groups of a Llama."""
ALONE = frozenset({"attention", "batch", "norm", "sampling"})
BY_DAY = ("llama",)
SHARED = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": TINY | SHARED,
    "qwen3_next": TINY | SHARED | NETS | {"head_dim": 16},
}
WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
WRONG = [
    ("llama", {"norm"}),
    pytest.param("llama", {"few_rows", "linear"}, marks=pytest.mark.nightly),
    *(pytest.param("llama", {name}, marks=pytest.mark.nightly) for name in ("activation", "attention", "rotary")),
    pytest.param("qwen3_moe", {"attention", "moe"}, marks=pytest.mark.nightly),
    pytest.param("glm4_moe_lite", {"norm", "rotary"}, marks=pytest.mark.nightly),
]


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_numbers, "LENGTH", 20)
    monkeypatch.setattr(kernel_numbers, "FIRST", (9, 4, 1))
    monkeypatch.setattr(delta_net, "CHUNK", 16)


def model(name: str, folder: Path, dtype: torch.dtype = torch.float32, code: str | None = None) -> Model:
    plain = TunedLinear(torch.device("meta"), "auto")
    methods = LinearMethods(plain) if code is None else methods_of(code, plain)
    spec = spec_of(name)
    return Model(EngineConfig("", block_size=4, cache_dir=str(folder)), dtype, Stored(spec, methods), CPU)


def make_wrong(monkeypatch: pytest.MonkeyPatch, groups: set[str]) -> None:
    """Kernels of these groups write floating-point numbers half as large again, and integers plus one."""
    run = InterpretedFunction.run

    def wrong(self: Any, *arguments: Any, **options: Any) -> Any:
        tensors = [item for item in arguments if isinstance(item, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        found = run(self, *arguments, **options)
        if group_of(self.fn.__module__, self.fn.__name__) in groups:
            for tensor, old in zip(tensors, before, strict=True):
                if not torch.equal(tensor, old):
                    tensor.copy_(
                        torch.where(tensor == old, tensor, tensor * 1.5 if tensor.is_floating_point() else tensor + 1)
                    )
        return found

    monkeypatch.setattr(InterpretedFunction, "run", wrong)


@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in sorted(TINY_MODELS)]
)
def test_right_kernels_agree(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert wrong_groups(model(name, tmp_path), GROUPS) == frozenset()
    assert caplog.text == ""


@pytest.mark.nightly
@pytest.mark.parametrize("code", [None, "fp8", "int8", "int4", "q8_0"])
def test_right_kernels_agree_in_16_bits_and_with_codes(code: str | None, tmp_path: Path) -> None:
    """The interpreter has no bfloat16."""
    given = model("llama", tmp_path, torch.float16, code)
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    spec = spec_of("llama", {"llama": TINY_MODELS["llama"] | sizes})
    assert wrong_groups(given._replace(stored=given.stored._replace(spec=spec)), GROUPS) == frozenset()


@pytest.mark.parametrize(("name", "groups"), WRONG)
def test_wrong_kernels_are_left_to_pytorch(
    name: str, groups: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_wrong(monkeypatch, groups)
    assert wrong_groups(model(name, tmp_path), USED | {"moe"} if "moe" in groups else USED) == groups
    lines = caplog.text.count("give other numbers than PyTorch here (logits of ")
    assert lines == len({"few_rows, linear" if "linear" in groups else name for name in groups})


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma2", "gpt_oss"))]
)
@pytest.mark.parametrize(
    ("wrong", "found"), [(None, frozenset()), ("attention", {"attention"}), ("batch", ALONE), ("sampling", ALONE)]
)
def test_of_a_model_that_transformers_computes_attention_and_sampling_are_compared(
    wrong: str | None, found: frozenset[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows and soft caps, and with sinks."""
    given, own = model("llama", tmp_path), spec_of(name)
    sizes = {"vocab_size": 200, "hidden_size": 48, "max_position_embeddings": 64, "bos_token_id": None}
    spec = TransformersSpec(name, layers=(), calls=own.attentions * 3, **sizes)
    if wrong is not None:
        make_wrong(monkeypatch, {wrong})
    assert wrong_groups(given._replace(stored=given.stored._replace(spec=spec)), ALONE) == found


@pytest.mark.parametrize(("name", "group"), [("llama", "sampling"), ("llama", "batch"), ("lfm2", "states")])
def test_without_the_kernels_of_all_steps_none_is_used(
    name: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_wrong(monkeypatch, {group})
    groups = USED | ({"states"} if group == "states" else set())
    assert wrong_groups(model(name, tmp_path), groups) == groups
    assert (
        f"the kernels for {'batch, sampling, states' if group == 'states' else 'batch, sampling'} give other numbers"
        in caplog.text
    )


def planted(monkeypatch: pytest.MonkeyPatch, kernel: str, run: Callable[..., Any]) -> None:
    """Another launch of one kernel."""
    launch = InterpretedFunction.run
    monkeypatch.setattr(
        InterpretedFunction,
        "run",
        lambda self, *given, **options: (run if self.fn.__name__ == kernel else launch)(self, *given, **options),
    )


def test_a_kernel_that_does_not_run_is_left_out_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such\ninstruction")

    with monkeypatch.context() as patched:
        planted(patched, "_gated_activation_kernel", fail)
        assert wrong_groups(model("llama", tmp_path), USED) == {"activation"}
    assert (
        "the kernels for activation give other numbers than PyTorch here (RuntimeError: no such instruction)"
        in caplog.text
    )
    caplog.clear()
    asked: list[Model] = []

    def compared(given: Model) -> Any:
        asked.append(given)
        return SimpleNamespace(faults=lambda working: {})

    monkeypatch.setattr(kernel_numbers, "Comparison", compared)
    assert wrong_groups(model("llama", tmp_path), USED) == {"activation"}, "the next start looks it up"
    assert caplog.text.count("RuntimeError: no such instruction") == 1
    encoder = Stored(spec_of("bert", TINY_ENCODERS), LinearMethods(TunedLinear(CPU, "auto")))
    assert wrong_groups(model("llama", tmp_path)._replace(stored=encoder), USED) == frozenset()
    assert wrong_groups(model("llama", tmp_path), USED - {"batch"}) == frozenset(), "PyTorch does all anyway"
    assert asked == []
    assert wrong_groups(model("llama", tmp_path), USED - {"norm"}) == frozenset()
    assert wrong_groups(model("llama", tmp_path, code="int4"), USED) == frozenset()
    monkeypatch.setattr("kvern.device.measurements.__version__", "other")
    assert wrong_groups(model("llama", tmp_path), USED) == frozenset()
    assert len(asked) == 3


def test_layers_of_each_kind_are_computed_and_those_whose_keys_they_borrow() -> None:
    config = TINY_MODELS["gemma4_text"]
    kinds = config["layer_types"][:2]
    spec = spec_of("gemma4_text", {"gemma4_text": config | {"num_hidden_layers": 8, "layer_types": kinds * 4}})
    assert [mixer.cache_of for mixer in attentions(spec)] == [None] * 6 + [4, 5]
    few = few_layers(spec)
    assert [mixer.cache_of for mixer in attentions(few)] == [None, None, 0, 1]
    assert [layer.rope for layer in few.layers] == [layer.rope for layer in spec.layers[4:]]


@pytest.mark.parametrize(
    ("name", "code", "wrong"),
    [
        ("qwen2_moe", None, None),
        ("qwen2_moe", None, "moe"),
        ("qwen3_next", None, None),
        *(pytest.param("qwen2_moe", code, None, marks=pytest.mark.nightly) for code in ("fp8", "int8", "int4", "q8_0")),
        pytest.param("qwen2_moe", "int8", "quantized", marks=pytest.mark.nightly),
    ],
)
def test_tuning_compares_products_and_experts(
    name: str, code: str | None, wrong: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A gate of the shared expert has one output."""
    monkeypatch.setattr("kvern.layers.tuned_experts.MOST_TOKENS", (8,))
    monkeypatch.setattr(tuned_linear, "CANDIDATES", {most: tuned_linear.CANDIDATES[most] for most in (1, 8)})
    if code == "fp8":  # Triton's interpreter loses a carry where it rounds to e4m3
        monkeypatch.setattr("kvern.layers.tuning.MOST_OFF", 0.2)
    spec = few_layers(spec_of(name, MIXTURES if code is None else {name: MIXTURES[name] | WIDE}))
    methods = model("llama", Path(), code=code).stored.methods
    decoder = Decoder(spec, Build(torch.float16, CPU, 21, GROUPS, linear=methods))
    fill_random(decoder)
    decoder.finish()
    if wrong is None:
        timed = tune(decoder, lambda calls: 1.0, {}, compare=True)
        assert any(key.startswith("experts") for key in timed) == (code in (None, "fp8", "int8"))
        assert caplog.text == ""
        return
    make_wrong(monkeypatch, {wrong})
    with pytest.raises(ConfigError, match=r"no way to multiply works here \(.* are off by .* triton_kernels"):
        tune(decoder, lambda calls: 1.0, {}, compare=True)


def test_tuning_accepts_kernels_that_round_rows_by_a_scale_of_the_checkpoint_and_those_that_do_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Random rows are cut off where activations of the checkpoint were smaller."""
    methods = linear_methods(
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, TunedLinear(CPU, "auto")
    )
    layer = Linear(64, {"a": 64}, Build(torch.float32, CPU, 1, GROUPS, linear=methods))
    layer.fill_random(torch.Generator().manual_seed(0))
    assert isinstance(layer.method, ScaledMethod)
    layer.method.input_scale.data.fill_(0.2 / 448)
    layer.method.finish()
    assert tune(layer, lambda calls: 1.0, {}, compare=True)
    assert caplog.text == ""


def attentions(spec: ModelSpec) -> list[AttentionSpec]:
    return [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]


def test_without_memory_nothing_is_compared_and_nothing_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patched:
        patched.setattr(Comparison, "_fault", full)
        assert wrong_groups(model("llama", tmp_path), USED) == frozenset()
    assert "numbers of kernels are not compared with PyTorch's at this start: OutOfMemoryError: full" in caplog.text
    assert not (tmp_path / "measurements").exists()


@pytest.mark.parametrize("amd", [True, False])
def test_a_start_compares_on_cards_of_amd(amd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Model] = []

    def wrong(given: Model, working: frozenset[str]) -> frozenset[str]:
        compared.append(given)
        return frozenset({"norm"} if len(compared) == 1 else {"moe"})

    monkeypatch.setattr("kvern.kernels.launch.is_amd", lambda device: amd)
    monkeypatch.setattr("kvern.runner.recorded_kernels.record_launches", lambda *_, **__: {})
    monkeypatch.setattr(
        "kvern.runner.kernel_check.broken_groups", lambda models, device: [frozenset({"rotary"})] * len(models)
    )
    monkeypatch.setattr(kernel_numbers, "wrong_groups", wrong)
    config, dtype, stored, _ = model("llama", tmp_path)
    card: Any = SimpleNamespace(type="cuda")
    for draft in (None, stored, stored._replace(has_head=True)):
        compared.clear()
        own, of_draft = usable_kernels(config, dtype, card, Startup(), stored, draft)
        assert "rotary" not in own | of_draft
        assert len(compared) == amd * (2 if draft is stored else 1)
        assert ("norm" in own) is not amd and "moe" in own
        assert ("moe" in of_draft) is not (amd and draft is stored)
