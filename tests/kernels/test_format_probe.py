"""A format of weights with a kernel of its own, added in this file with one registration and nothing else."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvern import LLM, SamplingParams
from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.kernels.launch import cdiv
from kvern.kernels.recording import Launch
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_format import LINEAR_METHODS, LinearFormat, LinearMethods, linear_methods
from kvern.layers.linear_method import INPUTS, OUTPUTS, LinearMethod, LinearShape, TensorLayout
from kvern.layers.tuned_linear import TunedLinear
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from kvern.runner.dummy_steps import META
from kvern.runner.kernel_check import broken_groups
from kvern.runner.loaded_model import Stored
from tests.kernels.recorded import recorded, recorded_at_start, zeroed
from tests.support.families import make_checkpoint
from tests.support.kernels.device_engines import OPTIONS
from tests.support.outputs import token_ids

ROWS, OUTPUTS_OF_TILE, COLUMNS = 16, 128, 128
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PROMPTS = [[5, 9, 17, 33, 2], [7]]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are recorded by Triton's interpreter")


@triton.jit
def _powers_kernel(
    x_ptr,
    codes_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outputs,
    inputs,
    x_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`x [rows, inputs]` times the powers of two `codes [outputs, inputs]`, with a bias, to `out [rows, outputs]`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, inputs, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column[None] < inputs
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None], (row[:, None] < rows) & inside, 0.0)
        codes = tl.load(codes_ptr + output[:, None] * inputs + column[None], (output[:, None] < outputs) & inside, 0)
        sign = tl.where(codes < 0, -1.0, 1.0)
        weight = tl.where(codes == 0, 0.0, sign * tl.exp2(-tl.abs(codes.to(tl.float32))))
        total += tl.dot(x.to(tl.float32), tl.trans(weight), input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + output, output < outputs, 0.0)[None]
    place = out_ptr + row[:, None] * outputs + output[None]
    tl.store(place, total, (row[:, None] < rows) & (output[None] < outputs))


class PowersMethod(LinearMethod):
    """`powers [outputs, inputs]` int8: the sign, and how often 1 is halved; 0 is 0."""

    name = "powers"
    powers: Tensor

    def layouts(self) -> Mapping[str, TensorLayout]:
        return {"powers": TensorLayout(torch.int8, (OUTPUTS, INPUTS))}

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        outputs, inputs = self.powers.shape
        out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
        grid = cdiv(len(x), ROWS), cdiv(outputs, OUTPUTS_OF_TILE)
        sizes = len(x), outputs, inputs, x.stride(0)
        _powers_kernel[grid](x, self.powers, bias, out, *sizes, ROWS, OUTPUTS_OF_TILE, COLUMNS)
        return out

    def dequantize(self) -> Tensor:
        return plain(self.powers).to(self.shape.dtype)


class Powers(LinearFormat):
    """Weights that are powers of two."""

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        return PowersMethod(shape)


@LINEAR_METHODS.register("powers")
def powers(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    return LinearMethods(unquantized, ((re.compile(quantization["layers"]), Powers()),))


def plain(codes: Tensor) -> Tensor:
    return codes.sign() * torch.exp2(-codes.float().abs())


def checkpoints(model: Path, folder: Path) -> tuple[Path, Path]:
    """A model whose projections are stored so, and one with the same numbers as plain weights."""
    stored, rounded = folder / "stored", folder / "rounded"
    tensors = load_file(model / "model.safetensors")
    coded = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = coded.pop(name)
        codes = (weight.sign() * (-weight.abs().log2()).round().clamp(1, 15)).to(torch.int8)
        coded[name.replace(".weight", ".powers")], tensors[name] = codes, plain(codes)
    for target, saved in ((stored, coded), (rounded, tensors)):
        shutil.copytree(model, target)
        save_file(saved, target / "model.safetensors")
    config = read_config(model) | {"quantization_config": {"quant_method": "powers", "layers": "_proj$"}}
    (stored / "config.json").write_text(json.dumps(config))
    return stored, rounded


@pytest.mark.usefixtures("few_products")
def test_a_format_with_its_kernel_is_one_file_and_one_registration(
    tmp_path: Path, on_device: Callable[..., LLM]
) -> None:
    stored, rounded = checkpoints(make_checkpoint("llama_bias", tmp_path / "model", num_hidden_layers=1), tmp_path)
    expected = LLM(str(rounded), threads=1, **OPTIONS).generate(PROMPTS, PARAMS)
    found = on_device(stored, **OPTIONS).generate(PROMPTS, PARAMS)
    assert token_ids(found) == token_ids(expected)


def test_a_start_compiles_the_kernel_of_a_format(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = checkpoints(make_checkpoint("llama_bias", tmp_path / "model", num_hidden_layers=1), tmp_path)
    monkeypatch.setattr(torch, "empty", zeroed(torch.empty))
    monkeypatch.setattr(torch, "empty_like", zeroed(torch.empty_like))
    with recorded(monkeypatch) as launched:
        on_device(stored, **OPTIONS).generate(PROMPTS, PARAMS)
    described = read_config(stored)
    model = Stored(spec_from_config(described), linear_methods(described, TunedLinear(META, "auto")))
    start = EngineConfig(str(stored), **OPTIONS), torch.float32, model, False
    known = recorded_at_start([start], monkeypatch)
    own = {form for form in launched if form[0] == "_powers_kernel"}
    assert own and own <= known.keys()


def test_a_format_whose_kernel_does_not_compile_is_refused() -> None:
    launch = Launch(_powers_kernel, (), (1,), {})
    assert (launch.name, launch.group) == ("_powers_kernel", __name__)
    said = rf"_powers_kernel of {re.escape(__name__)} does not compile here \(.+\), and nothing else does its work"
    with pytest.raises(ConfigError, match=said):
        broken_groups([{("_powers_kernel", ""): launch}], torch.device("cpu"))
