"""What processes compile is what a launch finds in Triton's cache."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.runtime.jit import JITFunction
from kvern.kernel_list import KERNELS, Inputs
from kvern.worker import kernel_processes
from tests.kernels.models import LARGE_MODELS, spec_of

driver.CudaLauncher = lambda *_: None  # is built with the libraries of a GPU
triton.runtime.driver.set_active(kernel_processes.TargetDriver(GPUTarget("cuda", 90, 32)))
kernel_processes.KERNELS = [kernel for kernel in KERNELS if kernel.group == "norm"]
spec, inputs = spec_of("llama", LARGE_MODELS), Inputs(torch.device("cpu"), torch.bfloat16, "zeros")
kernel_processes.compile_in_processes(spec, inputs)
coded = Inputs(torch.device("cpu"), torch.bfloat16, "zeros", cache_dtype=torch.int8)
kernel_processes.compile_in_processes(spec, coded)

found = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
run = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **options: run(self, *args, grid=grid, warmup=True, **options)
for kernel in kernel_processes.KERNELS:
    for arguments in kernel.launched(spec, inputs):
        kernel.make(spec, inputs, *arguments).launch()
print(found)
"""


def test_launches_find_what_processes_compiled(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[True, True]"
    marks = list(tmp_path.glob("kvern-*"))
    assert len(marks) == 2, "another start knows that all of it is there, one with another cache does not"
