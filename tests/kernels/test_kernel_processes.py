"""What processes compile is what a launch finds in Triton's cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from kvern.config import EngineConfig
from kvern.layers.linear_format import LinearMethods
from kvern.layers.tuned_linear import TunedLinear
from kvern.runner import kernel_check
from kvern.runner.dummy_steps import META
from kvern.runner.recorded_kernels import record_launches
from kvern.runner.loaded_model import Stored
from tests.kernels.models import LARGE_MODELS, spec_of

driver.CudaLauncher = lambda *_: None  # is built with the libraries of a GPU
triton.runtime.driver.set_active(kernel_check.TargetDriver(GPUTarget("cuda", 90, 32)))
model = Stored(spec_of("llama", LARGE_MODELS), LinearMethods(TunedLinear(META, "auto")))

def norms(config):
    launches = record_launches(config, torch.bfloat16, model, drafts=False)
    return {form: launch for form, launch in launches.items() if launch.group in ("norm", "activation")}

plain, other = norms(EngineConfig("")), norms(EngineConfig("", block_size=32, cuda_graphs=False))
other.popitem()
kernel_check.compile_in_processes([plain, other])

found = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
for launch in plain.values():
    launch.compile()
print(found, "sympy" in sys.modules)
"""

RECORDED = """
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from kvern.config import EngineConfig
from kvern.layers.tuned_linear import TunedLinear
from kvern.models.loader import outline_model, read_config, stored_methods
from kvern.runner import kernel_check
from kvern.runner.dummy_steps import META
from kvern.runner.loaded_model import Stored
from kvern.runner.recorded_kernels import record_launches

triton.runtime.driver.set_active(kernel_check.TargetDriver(GPUTarget("cuda", 90, 32)))
for name, quantization in (("gpt-oss-20b", None), ("llama-3.1-8b", "int4"), ("qwen3.6-35b-a3b", "fp8")):
    folder = Path("benchmarks/models") / name
    outline = outline_model(folder, "auto", "dummy", quantization)
    methods = stored_methods(read_config(folder), outline.spec, [], TunedLinear(META, "auto"), quantization)
    stored = Stored(outline.spec, methods)
    launches = record_launches(EngineConfig(str(folder)), torch.bfloat16, stored, drafts=False)
    print(name, any(launch.group == "hopper_linear" for launch in launches.values()))
"""


NAMES = """
import importlib, inspect, pkgutil
from triton.runtime.jit import JITCallable
import kvern.kernels

found = pkgutil.iter_modules(kvern.kernels.__path__)
modules = [importlib.import_module(f"kvern.kernels.{module.name}") for module in found]
values = [getattr(value, "_kernel", value) for module in modules for value in vars(module).values()]
functions = {value._fn_name: value for value in values if isinstance(value, JITCallable)}

def forget():
    for function in functions.values():
        function.hash, function.used_global_vals = None, {}

forget()
after = {name: function.cache_key for name, function in functions.items()}
for name, function in functions.items():
    forget()
    assert function.cache_key == after[name], name
    assert (function.raw_src, function.starting_line_number) == inspect.getsourcelines(function.fn), name
print(len(functions) > 100)
"""


def without_interpreter(script: str, cache: Path) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_a_kernels_name_does_not_depend_on_what_was_launched_before(tmp_path: Path) -> None:
    """Or each process and each start compiles once more what others compiled in another order."""
    done = without_interpreter(NAMES, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"


def test_kernels_of_quantized_models_are_known_without_weights(tmp_path: Path) -> None:
    """On a Hopper GPU some of them are for it alone."""
    done = without_interpreter(RECORDED, tmp_path)
    assert done.returncode == 0, done.stderr
    names = ("gpt-oss-20b", "llama-3.1-8b", "qwen3.6-35b-a3b")
    assert done.stdout.split("\n")[:-1] == [f"{name} True" for name in names]


def test_launches_find_what_processes_compiled(tmp_path: Path) -> None:
    """And what is launched is known without the modules for which PyTorch takes seconds."""
    done = without_interpreter(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[True, True, True] False"
    marks = list(tmp_path.glob("kvern-*"))
    assert len(marks) == 2, "another start knows that all of it is there, one with other kernels does not"
