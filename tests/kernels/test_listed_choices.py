"""What the tuner may choose on a Hopper GPU is on the list of kernels, which is compiled at once; what it times."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvern.formats.gpu.candidates import DETERMINISTIC, CodesTiles
from kvern.kernels.quantize_rows import RowCodes
from kvern.layers.build import Build
from kvern.layers.embedding import Embedding
from kvern.layers.linear import Linear, Weighted
from kvern.layers.linear_format import linear_methods
from kvern.layers.linear_method import CodesProduct, LinearMethod
from kvern.layers.tuned_linear import TunedLinear
from kvern.layers.tuning import tune
from kvern.layers.unquantized import Unquantized
from kvern.models.decoder import Decoder
from tests.kernels.models import LARGE_MODELS, spec_of
from tests.support.kernel_list import KERNELS, Inputs
from tests.support.kernel_list.quantized import packed_kinds

CPU, META = torch.device("cpu"), torch.device("meta")
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}}
OURS = frozenset({"quantized", "hopper_linear"})


def tuned(model: nn.Module) -> list[LinearMethod]:
    layers = (layer for layer in model.modules() if isinstance(layer, Weighted) and not isinstance(layer, Embedding))
    return [method for layer in layers for method in layer.method.methods()]


@pytest.mark.parametrize(("config", "online"), [({}, None), ({}, "fp8"), (AWQ, None)])
def test_what_may_be_chosen_is_listed(
    config: dict[str, Any], online: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Inputs, "hopper", True)
    spec = spec_of("llama", LARGE_MODELS)
    layers = tuple(replace(layer, rope=None) for layer in spec.layers)
    plain, own = (linear_methods(config, way, online) for way in (Unquantized(), TunedLinear(META, "auto")))
    model = Decoder(replace(spec, layers=layers), Build(torch.bfloat16, META, 1, OURS, linear=own))
    packed = packed_kinds(spec, Build(torch.bfloat16, META, 1, linear=plain))
    assert bool(packed) == bool(config or online) and all(kind.part != "embed_tokens" for kind in packed)
    inputs = Inputs(CPU, torch.bfloat16, "empty", packed=packed)
    forms = [(kernel.name, form) for kernel in KERNELS for form in kernel.launched(spec, inputs)]
    listed = {item for _, form in forms for item in form if isinstance(item, tuple)}
    offered = {way for method in tuned(model) for ways in method.candidates().values() for way in ways if way}
    assert len(offered) > 10
    offered = {CodesTiles(*way)._replace(group=1) if way[-1] == "tiles" else way for way in offered}  # one kernel
    missing = {way for way in offered if way not in listed and len(way) > 1}  # runs made plain, tiles of many rows
    assert not missing
    several = {form[-1] for name, form in forms if name == "quantized, several rows"}
    assert several == ({DETERMINISTIC} if packed else set()), "others are slower there"


class Offering(Unquantized):
    """Plain layers with two ways to multiply, of which one takes codes."""

    def linear(self, shape: Any, build: Build) -> LinearMethod:
        method = super().linear(shape, build)
        made = RowCodes(torch.zeros(2, 4), torch.ones(2, 1))

        def multiply_codes(x: RowCodes, bias: Tensor | None) -> Tensor:
            assert x is made
            return torch.ones(())

        of_codes = CodesProduct(lambda x: made, multiply_codes)  # type: ignore[arg-type]
        method.candidates = lambda: {2: {"codes": of_codes, "plain": lambda x, bias: x}, 9: {"only": of_codes}}  # type: ignore[method-assign,dict-item]
        return method


def test_only_what_is_multiplied_by_is_timed_and_codes_without_their_making() -> None:
    build = Build(torch.float32, CPU, 1, linear=linear_methods({}, Offering(), None))
    table = Embedding(5, 4, 1.0, build)
    model = nn.ModuleList([table, Linear(4, {"q_proj": 3}, build)])
    timed: list[Any] = []

    def clock(calls: list[Callable[[], object]]) -> float:
        timed.append([call() for call in calls])
        return float(len(timed))

    assert tune(model, clock, {}) == {"unquantized, 3 x 4, torch.float32, 2 rows": "codes"}
    (codes,), (plain,) = timed
    assert codes.shape == () and plain.shape == (2, 4)
