"""Products with packed weights on a CPU, beside float64."""

import ctypes
import math
import mmap
from functools import partial
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor

from kvern.cpu.check import rounded_in_runs
from kvern.cpu.packed import RUN, Groups, GroupsProduct, Int8Product, side_by_side
from kvern.formats.bitsandbytes import Nf4Method
from kvern.formats.compressed_tensors import PackQuantizedMethod
from kvern.formats.fp4 import MX, NV, fp4_format
from kvern.formats.gguf.header import BY_NAME
from kvern.formats.gguf.method import GgufFormat
from kvern.formats.groups import Form, GroupedFormat
from kvern.formats.method import QuantizedMethod
from kvern.formats.online import made_online
from kvern.formats.scaled import Block, Rounding, Scaled, quantized_rows
from kvern.layers.build import Build
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import LinearMethod, LinearShape, Part
from kvern.layers.unquantized import Unquantized
from tests.support.cache_folder import load_kernels

CPU = torch.device("cpu")
SIZES = [(1, 16, 64), (3, 83, 102), (7, 200, 320), (17, 96, 1024)]
"""Rows, outputs, inputs."""


@pytest.fixture(autouse=True)
def _loaded() -> None:
    load_kernels("cpu_packed", 2)


def made(linear_format: LinearFormat, outputs: int, inputs: int, dtype: torch.dtype) -> LinearMethod:
    """A random matrix of a format, packed for a CPU."""
    build = Build(dtype, CPU, 64, frozenset({"cpu_packed"}), linear=LinearMethods(linear_format))
    method = linear_format.linear(LinearShape(outputs, inputs, dtype, CPU), build)
    method.use_kernels(build)
    method.fill_random(torch.Generator().manual_seed(outputs))
    return method


def activations(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator)
    return (x * torch.rand(rows, 1, generator=generator) * 9).to(dtype)


def size_of(method: LinearMethod) -> int:
    return sum(parameter.nbytes for parameter in method.parameters())


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [Rounding("int8"), Rounding("int8", limit=3.0)])
def test_int8_rounds_activations_and_sums_exactly(
    size: tuple[int, int, int], dtype: torch.dtype, how: Rounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, outputs, inputs = size
    method = made(Scaled("int8", activations=how), outputs, inputs, dtype)
    plain = method.dequantize().clone()
    method.finish()
    assert torch.equal(method.dequantize(), plain)
    x, bias = activations(rows, inputs, dtype), activations(1, outputs, dtype)[0]
    x[-1] = 0
    codes, scale = quantized_rows(x, "int8", how.limit)
    matrix = made(Scaled("int8", activations=how), outputs, inputs, dtype)
    weight = matrix.codes.double() * matrix.scale.double()  # type: ignore[operator]
    expected = codes.double() @ weight.t() * scale + bias.double()
    monkeypatch.setattr(Tensor, "new_empty", lambda given, *shape: given.new_full(shape, float("nan")))
    found = method.multiply(x, bias)
    assert relative_error(found, expected) < (1e-6 if dtype is torch.float32 else 3e-3)
    for row in range(rows):
        assert torch.equal(method.multiply(x[row : row + 1], bias)[0], found[row])


def grouped(code: str, group: int, scale: torch.dtype, *, zero: bool = False, ordered: bool = False) -> LinearFormat:
    form = Form(code, group, scale, zero=zero, ordered=ordered)
    return GroupedFormat("test", partial(PackQuantizedMethod, form=form), group)


NAMES = ("weight", "weight_scale", "weight_scale_2", "input_scale")
FORMATS = {
    "int4 by 32": grouped("int4", 32, torch.float16),
    "int4 by 64, zeros": grouped("int4", 64, torch.bfloat16, zero=True),
    "int4 by 128, zeros, order": grouped("int4", 128, torch.float16, zero=True, ordered=True),
    "int4 by 8": grouped("int4", 8, torch.float16),
    "int4 by row": grouped("int4", -1, torch.float32),
    "int8 by 32": grouped("int8", 32, torch.float16),
    "int8 by 128, zeros": grouped("int8", 128, torch.bfloat16, zero=True),
    "int8 by row, W8A16": Scaled("int8"),
    "int8 by 1 x 64, zeros": Scaled("int8", Block(1, 64), zeros=True),
    "nf4": GroupedFormat("NF4", partial(Nf4Method, nested=True), 64),
    "mxfp4": fp4_format("MXFP4", MX, NAMES),
    "nvfp4": fp4_format("NVFP4", NV, NAMES),
}


FORMATS |= {name.upper(): GgufFormat(BY_NAME[name]) for name in ("q4_0", "q8_0", "iq4_nl", "mxfp4", "q4_k", "q6_k")}


def matrix(linear_format: LinearFormat, outputs: int, inputs: int, dtype: torch.dtype) -> QuantizedMethod:
    """As `made`, with zeros and factors of all sizes."""
    method = made(linear_format, outputs, inputs, dtype)
    assert isinstance(method, QuantizedMethod)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in method.named_parameters():
        if name == "zero":
            parameter.random_(3, 9, generator=generator)
        if name == "factor":
            parameter.uniform_(0.5, 2, generator=generator)
    return method


RUNS = {"int4 by 8": 8, "nvfp4": 16, "Q6_K": 16, "nf4": 0}
"""So many activations are rounded with a scale in bfloat16, by format; RUN of others. NF4's numbers are no integers."""


@pytest.mark.sample(30)
@pytest.mark.parametrize("size", [(1, 64, 256), (3, 88, 768), (9, 24, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_groups_round_activations_of_bfloat16_alone(
    name: str, dtype: torch.dtype, size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, outputs, inputs = size
    method, exact, plain = (matrix(FORMATS[name], outputs, inputs, number) for number in (dtype, torch.float32, dtype))
    exact._on_cpu = plain._on_cpu = False
    for item in (method, exact, plain):
        item.finish()
    assert method.codes.dim() == 4, "it is not packed"
    assert torch.equal(method.dequantize(), plain.dequantize())
    ids = torch.tensor([outputs - 1, 0, 17])
    assert torch.equal(method.embed(ids), plain.embed(ids))
    assert size_of(method) <= 1.8 * size_of(plain), "there are two copies"
    x, bias = activations(rows, inputs, dtype), activations(1, outputs, dtype)[0]
    monkeypatch.setattr(Tensor, "new_empty", lambda given, *shape: given.new_full(shape, float("nan")))
    found = method.multiply(x, bias)
    weight, run = exact.dequantize().double().t(), 0 if dtype is torch.float32 else RUNS.get(name, RUN)
    order = getattr(method, "order", None)
    columns = torch.arange(inputs) if order is None else order
    used = x.double()
    if run:
        used[:, columns] = rounded_in_runs(x[:, columns], run)
    tolerance = 2e-6 if dtype is torch.float32 else 3e-3
    assert relative_error(found, used @ weight + bias.double()) < tolerance
    assert relative_error(found, x.double() @ weight + bias.double()) < (7e-3 if run else tolerance)
    for row in range(rows):
        assert torch.equal(method.multiply(x[row : row + 1], bias)[0], found[row])
    assert torch.equal(method.multiply_part(x, 16, 8), method.multiply(x, None)[:, 16:24])


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("linear_format", [Scaled("int8", activations=Rounding("int8")), FORMATS["int4 by 64, zeros"]])
def test_a_row_that_is_not_finite_is_none_of_the_others(linear_format: LinearFormat, number: float) -> None:
    method = made(linear_format, 48, 64, torch.bfloat16)
    method.finish()
    x = activations(3, 64, torch.bfloat16)
    alone = method.multiply(x, None)
    x[1, 5] = number
    found = method.multiply(x, None)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], alone[::2])


def test_int4_made_while_loading_is_off_by_half_a_step_at_most() -> None:
    method = made_online("int4", Unquantized()).default.linear(
        LinearShape(40, 96, torch.float32, CPU), Build(torch.float32, CPU, 64)
    )
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(3))
    weight[3, :32] = 0
    weight[4, 32:64] += 5
    for first in (0, 25):
        method.load("weight", weight[first : first + 25], Part(0, range(40), range(96)), first)
    method.finish()
    groups = weight.view(40, 3, 32)
    step = (groups.amax(-1).clamp_min(0) - groups.amin(-1).clamp_max(0)) / 15
    assert ((method.dequantize().view_as(groups) - groups).abs() <= 0.51 * step.unsqueeze(-1) + 1e-6).all()


@pytest.mark.parametrize("linear_format", [Scaled("int8", activations=Rounding("int8")), FORMATS["int4 by 64, zeros"]])
def test_bits_are_the_same_with_any_number_of_threads(linear_format: LinearFormat) -> None:
    method = made(linear_format, 400, 256, torch.bfloat16)
    method.finish()
    x = activations(9, 256, torch.bfloat16)
    found = []
    for threads in (2, 1, 3):
        load_kernels("cpu_packed", threads)
        found.append(method.multiply(x, None))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def at_end_of_memory(tensor: Tensor) -> Tensor:
    """The same numbers right before a page that nobody may read."""
    size = math.ceil(tensor.nbytes / mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    plain = torch.frombuffer(memory, dtype=torch.uint8, count=size)[size - tensor.nbytes :]
    behind = ctypes.c_void_p(plain.data_ptr() + tensor.nbytes)
    assert ctypes.CDLL(None).mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return plain.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def multiply_at_end_of_memory() -> None:
    """Products of every format whose tensors all lie so: reading or writing behind one ends the process."""
    load_kernels("cpu_packed", 1)
    Tensor.new_empty = lambda given, *shape: at_end_of_memory(given.new_zeros(shape))  # type: ignore[method-assign]
    for rows, outputs, inputs in ((1, 83, 256), (1, 128, 256), (11, 83, 256)):
        for dtype in (torch.float32, torch.bfloat16):
            bias = at_end_of_memory(activations(1, outputs, dtype)[0])
            for name in FORMATS:
                method = matrix(FORMATS[name], outputs, inputs, dtype)
                method.finish()
                product = method._cpu_product
                assert isinstance(product, GroupsProduct)
                parts = (at_end_of_memory(part) if isinstance(part, Tensor) else part for part in product._matrix)
                moved = GroupsProduct(Groups(*parts), outputs, rounded=dtype is torch.bfloat16)
                if moved._numbers is not None:
                    moved._numbers = at_end_of_memory(moved._numbers)
                x = at_end_of_memory(activations(rows, inputs, dtype))
                assert torch.equal(moved(x, bias), method.multiply(x, bias))
            x = at_end_of_memory(activations(rows, 102, dtype))
            codes = at_end_of_memory(side_by_side(torch.ones(outputs, 102, dtype=torch.int8), 4))
            scale = at_end_of_memory(side_by_side(torch.ones(outputs, 1)))
            assert Int8Product(codes, scale, outputs)(x, bias).isfinite().all()


def test_nothing_is_read_behind_a_tensor() -> None:
    process = get_context("spawn").Process(target=multiply_at_end_of_memory)
    process.start()
    process.join()
    assert process.exitcode == 0
