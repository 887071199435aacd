"""What `kvern bench kernels` times; kernels are not run here."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvern.bench import kernels
from kvern.config import EngineConfig
from kvern.layers.linear_format import LinearMethods
from kvern.layers.tuned_linear import TunedLinear
from kvern.runner.loaded_model import Stored
from tests.kernels.models import TINY_ENCODERS, TINY_MODELS, spec_of
from tests.kernels.recorded import recorded, zeroed

CPU = torch.device("cpu")
STEPS = {"2 x 9 keys": ((8, 1),) * 2, "2 x 3 after 4": ((4, 3),) * 2}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU all of it is timed")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[kernels.Measured]]:
    """What is timed of a model: every call runs once, in a microsecond."""

    def once(calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        return 1e-6

    def steps_alone(steps: Any) -> list[kernels.Measured]:
        return [kernels.Measured("step", name, 1e-6) for name, step in steps.items() if step() is not steps]

    monkeypatch.setattr(torch, "empty", zeroed(torch.empty))
    monkeypatch.setattr(torch, "empty_like", zeroed(torch.empty_like))
    monkeypatch.setattr(kernels, "time_calls", once)
    monkeypatch.setattr(kernels, "_other_kernels", steps_alone)
    monkeypatch.setattr(kernels, "STEPS", STEPS)
    monkeypatch.setattr(kernels, "SAMPLED", 2)

    def measure(name: str, *codes: str, models: Any = TINY_MODELS, **options: Any) -> list[kernels.Measured]:
        model = Stored(spec_of(name, models), LinearMethods(TunedLinear(CPU, "triton")))
        with torch.inference_mode(), recorded(monkeypatch):
            config = EngineConfig("", block_size=4, **options)
            return list(kernels.measured_kernels(config, torch.float32, model, codes, CPU))

    return measure


def test_ways_to_multiply_attention_sampling_and_steps(measured: Callable[..., list[kernels.Measured]]) -> None:
    found = measured("llama", "int4", "nf4")
    products = [item for item in found if "int4, " in item.kernel]
    assert products and all(item.bytes > 0 and item.operations > 0 for item in products)
    plain = next(item for item in found if "unquantized" in item.shape and item.shape.startswith("1 rows"))
    assert plain.bytes > 4 * plain.operations / 2, "each weight of 4 bytes is read for one multiplication"
    names = {item.kernel for item in found}
    assert {"attention", "sampling, filtered", "constraints", "log-probabilities", "step"} <= names
    (decode,) = {item.operations for item in found if item.kernel == "attention" and item.shape.startswith("2 x 9")}
    assert decode == 4 * 2 * 9 * 4 * 12
    assert [item.shape for item in found if item.kernel == "step"] == list(STEPS)


def test_experts_count_the_weights_that_have_tokens(measured: Callable[..., list[kernels.Measured]]) -> None:
    experts = [item for item in measured("qwen3_moe") if ", experts, " in item.shape]
    few, many = experts[0], experts[-1]
    assert 0 < few.bytes < many.bytes and few.operations < many.operations


@pytest.mark.parametrize("name", sorted(TINY_ENCODERS)[:1])
def test_an_encoders_step(name: str, measured: Callable[..., list[kernels.Measured]]) -> None:
    assert [item.kernel for item in measured(name, models=TINY_ENCODERS)] == ["step"]


def test_every_format_is_known() -> None:
    plain = TunedLinear(CPU, "auto")
    assert all(kernels.methods_of(code, plain) != LinearMethods(plain) for code in kernels.CODES)
