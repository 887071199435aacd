"""Products by matrix tiles (AMX): in their portable form on any machine, which AMX is compared with where it is."""

import ctypes
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvern import LLM, SamplingParams
from kvern.cpu import library
from kvern.cpu.kernel_library import FLAGS, NATIVE, SOURCES, BuildError, find_compiler
from kvern.cpu.linear import gated_linear, has_tiles, linear, linear_heads, pack, pack_heads, unpack
from kvern.cpu.packed import Int8Product, side_by_side
from kvern.cpu.processor import X86
from kvern.cpu.rows import ACTIVATIONS
from kvern.runner.captured_decodes import CapturedDecodes
from tests.support.cache_folder import load_kernels, pretend_tiles

OWN = Path(__file__).with_name("tiles.cpp")
MULTIPLY = ("linear.cpp", "packed_int8.cpp")
EMULATED = (*NATIVE, "-DKVERN_EMULATED_TILES")
SHAPES = ((16, 2), (1, 1), (17, 31), (64, 64), (80, 96), (200, 33), (333, 1030))
"""Outputs and inputs."""


def compiled(made: Path, *arguments: str) -> Path:
    try:
        command = find_compiler().command
    except BuildError as error:
        pytest.skip(str(error))
    given = [command, *FLAGS, "-O1", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", *arguments, "-o", str(made)]
    done = subprocess.run(given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return made


def test_sums_of_tiles_are_those_of_numbers(tmp_path: Path) -> None:
    """In the order that Intel describes, to the last bit; with AMX, tiles give the same."""
    done = subprocess.run([compiled(tmp_path / "tiles", *NATIVE, str(OWN))], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has such instructions")
@pytest.mark.parametrize(
    "source",
    [OWN, SOURCES / MULTIPLY[0], pytest.param(SOURCES / MULTIPLY[1], marks=pytest.mark.nightly)],
    ids=("own", *MULTIPLY),
)
def test_kernels_compile_for_tiles(source: Path, tmp_path: Path) -> None:
    compiled(tmp_path / "kernels.o", *X86[-1].flags, "-c", str(source))


class Loaded:
    """The library, with some of its functions from another one."""

    def __init__(self, some: ctypes.CDLL, others: ctypes.CDLL) -> None:
        self.some, self.others, self._name = some, others, others._name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.some if hasattr(self.some, name) else self.others, name)

    def kvern_set_threads(self, threads: int) -> None:
        self.some.kvern_set_threads(threads)
        self.others.kvern_set_threads(threads)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    sources = [str(SOURCES / name) for name in (*MULTIPLY, "threads.cpp")]
    made = tmp_path_factory.mktemp("tiles") / "products.so"
    return ctypes.CDLL(str(compiled(made, *EMULATED, "-O0", "-shared", "-pthread", *sources)))


@pytest.fixture
def tiles(emulated: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products by tiles, as if the processor had them."""
    load_kernels("cpu_linear", 1)
    assert library._loaded is not None
    with monkeypatch.context() as patch:
        patch.setattr(library, "_loaded", Loaded(emulated, library._loaded))
        patch.setattr(library, "_symbols", {})
        pretend_tiles(patch, there=True, own=True)
        emulated.kvern_set_threads(1)
        yield


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_float64_and_of_each_row_alone(outputs: int, inputs: int) -> None:
    assert has_tiles()
    x, weight, bias = (random(*shape).bfloat16() for shape in ((150, inputs), (outputs, inputs), (outputs,)))
    packed, gated = pack(weight), pack(torch.cat((weight, weight.flip(0))), gated=True)
    assert torch.equal(unpack(packed), weight)
    expected = x.double() @ weight.double().T + bias.double()
    gate, up = expected, (expected - bias.double()).flip(1) + bias.double()
    wide = linear(x, packed, bias, torch.float32)
    assert error(wide, expected) < 1e-6
    found = gated_linear(x, gated, torch.cat((bias, bias)), ACTIVATIONS["silu"])
    assert error(found, F.silu(gate) * up) < 5e-3
    for rows in (1, 2, 4, 5, 15, 16, 17, 33, 48, 64, 65, 70):
        assert torch.equal(linear(x[-rows:], packed, bias, torch.float32), wide[-rows:])
    library._loaded.kvern_set_threads(3)  # type: ignore[union-attr]
    assert torch.equal(linear(x, packed, bias, torch.float32), wide)
    assert torch.equal(gated_linear(x[3:10], gated, torch.cat((bias, bias)), ACTIVATIONS["silu"]), found[3:10])


@pytest.mark.usefixtures("tiles")
def test_heads_are_multiplied_by_their_own() -> None:
    x, weights = random(37, 3, 50).bfloat16()[..., :46], random(3, 40, 46).bfloat16()
    packed = pack_heads(weights)
    found = linear_heads(packed, x)
    assert error(found, torch.einsum("thi,hoi->tho", x.double(), weights.double())) < 5e-3
    assert torch.equal(linear_heads(packed, x[6:8]), found[6:8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (83, 102), (200, 320), (96, 1024)])
def test_bytes_are_multiplied_to_the_same_bits(
    outputs: int, inputs: int, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    load_kernels("cpu_packed", 1)
    x, bias = random(70, inputs).to(dtype), random(outputs).to(dtype)
    codes = torch.randint(-128, 128, (outputs, inputs), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    product = Int8Product(side_by_side(codes, 4), side_by_side(random(outputs, 1).abs()), outputs)
    expected = product(x, bias)
    request.getfixturevalue("tiles")
    for rows in (1, 4, 5, 16, 31, 70):
        assert torch.equal(product(x[:rows], bias), expected[:rows])


PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [[5 + row, 6, 7, *range(8, 9 + 3 * row)] for row in range(9)]


def answers(llm: LLM, prompts: list[list[int]]) -> Any:
    return [(part.token_ids, part.logprobs) for output in llm.generate(prompts, PARAMS) for part in output.outputs]


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}])
def test_steps_are_captured_and_rows_depend_on_no_others(
    options: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = 0
    score = CapturedDecodes.score

    def counted(*given: Any) -> Any:
        nonlocal captured
        found = score(*given)
        captured += found is not None
        return found

    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompt = list(range(30, 90))

    def likelihood() -> float:
        with LLM("kvern-1m", dtype="bfloat16", threads=1, **options) as llm:
            [output] = llm.generate([prompt], scored)
            return sum(next(iter(one.values())).logprob for one in (output.prompt_logprobs or [])[1:] if one)

    load_kernels("cpu_sampling", 1)
    pretend_tiles(monkeypatch, there=False)
    plain = likelihood()
    request.getfixturevalue("tiles")
    assert likelihood() == pytest.approx(plain, rel=2e-3)
    monkeypatch.setattr(CapturedDecodes, "score", counted)
    with LLM("kvern-1m", dtype="bfloat16", threads=1, **options) as llm:
        together = answers(llm, PROMPTS)
        assert captured >= 10
        assert [answer for prompt in PROMPTS for answer in answers(llm, [prompt])] == together
