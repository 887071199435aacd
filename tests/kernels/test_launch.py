"""What was compiled is launched again only for arguments that Triton would compile to the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.build import compile_module_from_src

from kvern.kernels.hopper import tiles_of
from kvern.kernels.launch import Launcher, Rows, rows_of
from tests.support.kernels.copied_rows import Range, Shape, copy


class OnDevice(torch.Tensor):
    """A tensor that says it is on the first GPU."""

    def get_device(self) -> int:
        return 0


class Compiled:
    function = packed_metadata = None

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)


class Kernel:
    """Compiles each time that it is asked."""

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Compiled:
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return Kernel()


def test_the_same_kind_of_arguments_compiles_once(kernel: Kernel) -> None:
    launcher = Launcher(kernel)
    launcher._variable = 2
    one, other = (torch.zeros(8).as_subclass(OnDevice) for _ in range(2))
    launcher[3, 2](one, 48, 128, num_warps=4)
    launcher[5,](other, 32, 128, num_warps=4)
    assert len(kernel.compiled) == 1
    assert kernel.compiled[0].launches == [(5, 1, 1, 7, None, None, None, None, None, other, 32, 128)]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: ((x[1:], 48, 128), {"num_warps": 4}),
        lambda x: ((x.half(), 48, 128), {"num_warps": 4}),
        lambda x: ((x, 1, 128), {"num_warps": 4}),
        lambda x: ((x, 47, 128), {"num_warps": 4}),
        lambda x: ((x, 1 << 36, 128), {"num_warps": 4}),
        lambda x: ((x, 48, 64), {"num_warps": 4}),
        lambda x: ((x, 48, 128), {"num_warps": 8}),
        lambda x: ((x, 48, 128), {"num_stages": 4}),
    ],
    ids=["unaligned", "dtype", "one", "odd", "large", "constant", "warps", "option"],
)
def test_another_kind_of_arguments_compiles_anew(kernel: Kernel, change: Any) -> None:
    launcher = Launcher(kernel)
    launcher._variable = 2
    x = torch.zeros(8).as_subclass(OnDevice)
    launcher[1,](x, 48, 128, num_warps=4)
    arguments, options = change(x)
    launcher[1,](*arguments, **options)
    assert len(kernel.compiled) == 2


def test_tiles_compile_by_their_shape_and_missing_arguments_by_their_place(kernel: Kernel) -> None:
    launcher = Launcher(kernel)
    launcher._variable = 3
    x, other = (torch.zeros(16, 64, dtype=torch.bfloat16).as_subclass(OnDevice) for _ in range(2))
    launcher[1,](tiles_of(x, 8, 32), x, None, 128)
    launcher[1,](moved := tiles_of(other, 8, 32), other, None, 128)
    assert len(kernel.compiled) == 1
    assert kernel.compiled[0].launches[0][-4:] == (moved, other, None, 128)
    for changed in (
        (tiles_of(x, 16, 32), x, None),
        (tiles_of(x.half(), 8, 32), x, None),
        (tiles_of(x, 8, 32), None, x),
    ):
        launcher[1,](*changed, 128)
    assert len(kernel.compiled) == 4


def test_the_fields_of_tuples_are_arguments_like_others(kernel: Kernel) -> None:
    launcher = Launcher(kernel)
    launcher._variable = 2
    x, other = (torch.zeros(4, 16).as_subclass(OnDevice) for _ in range(2))
    launcher[1,](rows_of(x), Rows(x, Rows(None, 48)), 128)
    launcher[1,](rows_of(other), Rows(x, Rows(None, 32)), 128)
    assert len(kernel.compiled) == 1
    assert kernel.compiled[0].launches[0][-3:] == (rows_of(other), (x, (None, 32)), 128)
    for first, second in (
        (Rows(x[0, 1:], 16), Rows(x, Rows(None, 48))),
        (Rows(x, 1), Rows(x, Rows(None, 48))),
        (rows_of(x), Rows(x, Rows(x, 48))),
        (rows_of(x), Rows(x, Rows(None, 47))),
        (rows_of(x), Rows(x, None)),
    ):
        launcher[1,](first, second, 128)
    assert len(kernel.compiled) == 6


def test_fields_of_tuples_reach_a_kernel(device: torch.device) -> None:
    x, out = torch.randn(4, 80, device=device)[:, :64], torch.zeros(4, 64, device=device)
    copy[4,](rows_of(x), rows_of(out), Range(3, (48,)), Shape(40, 64))
    expected = torch.zeros(4, 64, device=device)
    expected[:, 3:40] = x[:, 3:40]
    assert torch.equal(out, expected)


COMPILED = """
import torch, triton
from kvern.kernels.launch import Rows, rows_of
from kvern.kernels.recording import recording
from triton.backends.compiler import GPUTarget
from kvern.runner.kernel_check import TargetDriver
from tests.support.kernels.copied_rows import Range, Shape, copy

triton.runtime.driver.set_active(TargetDriver(GPUTarget("cuda", 90, 32)))
x, out = (torch.empty(4, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
with recording() as launches:
    for first, end in ((0, 64), (1, 48), (3, 1), (16, 7)):
        copy[4,](rows_of(x), rows_of(out), Range(first, (end,)), Shape(50, 64))
    copy[4,](rows_of(x[:, :1]), Rows(None, 1), Range(0, (64,)), Shape(50, 64))
one, other = (launch.compile() for launch in launches.values())
signature = one.asm["ttir"].split("@copy(")[1].split("attributes")[0]
print(signature.count("bf16> {tt.divisibility = 16"), signature.count("i32 {tt.divisibility = 16"))
print(signature.count("%part"), "tt.store" in one.asm["ttir"], "tt.store" in other.asm["ttir"])
"""


def test_fields_of_tuples_are_specialised_unless_a_kernel_says_otherwise() -> None:
    """Pointers and strides are multiples of 16 to the compiler; a range compiles once, whatever its numbers."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2", "2", "True", "False"]


SOURCE = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* arguments) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&definition); }
"""
"""A module as those that launch Triton's kernels: of one name, and without a state of its own."""


@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="no C compiler that Triton looks for")
def test_what_launches_a_kernel_stays_when_another_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread does between loading and use; one that was loaded before comes from a cache of Python's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        loaded = [compile_module_from_src(SOURCE % number, "launcher") for number in (3, 5)]
    assert [module.launch() for module in loaded] == [3, 5]
