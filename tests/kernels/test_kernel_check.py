"""A kernel that does not work is never replaced in silence: each start names it."""

import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from kvern.kernels.recording import Launches
from kvern.runner import kernel_check
from kvern.runner.kernel_check import broken_groups


class Deadly(NamedTuple):
    """A launch of a kernel that ends its compiler's process, by a signal or as LLVM may."""

    name: str
    group: str
    ends: Callable[[], object]
    engine: int

    def compile(self) -> Any:
        assert os.getpid() != self.engine, "it would end the engine"
        self.ends()


class Planted(NamedTuple):
    """A launch of a kernel that works, or does not compile."""

    name: str
    group: str
    works: bool

    def compile(self) -> Any:
        if not self.works:
            raise AttributeError("module 'gluon' has no attribute 'thread_barrier'\nat 3:4")
        return self

    @property
    def hash(self) -> str:
        return self.name

    @property
    def run(self) -> None:
        """What loads the kernel."""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_kernel_that_ends_its_compiler_ends_no_engine(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others are compiled meanwhile, also if no process is left."""
    driver = kernel_check.TargetDriver(GPUTarget("hip", "gfx942", 64))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver, set_active=lambda driver: None))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(kernel_check, "_mark", lambda launches, target: tmp_path / "mark")
    monkeypatch.setattr(kernel_check, "MOST_PROCESSES", processes)
    aborts = partial(signal.raise_signal, signal.SIGUSR1)
    planted: list[Any] = [
        Deadly(f"_{name}_kernel", name, ends, os.getpid())
        for name, ends in (("norm", aborts), ("moe", partial(os._exit, 1)), ("rotary", aborts))
    ]
    planted += [Planted("_sum_kernel", "sampling", True), Planted("_gated_kernel", "activation", True)]
    launches: Launches = {(launch.name, ""): launch for launch in planted}
    assert broken_groups([launches], torch.device("cuda")) == [{"norm", "moe", "rotary"}]
    assert f"the compiler of _norm_kernel died with exit code -{signal.SIGUSR1:d}" in caplog.text
    assert not (tmp_path / "mark").exists(), "the next start must find it again"


def test_a_kernel_that_does_not_compile_is_named_at_every_start(caplog: pytest.LogCaptureFixture) -> None:
    planted = [Planted("_sum_kernel", "norm", False), Planted("_norm_kernel", "norm", True)]
    planted.append(Planted("_gated_kernel", "activation", True))
    launches: Launches = {(launch.name, ""): launch for launch in planted}  # type: ignore[misc]
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert broken_groups([launches], torch.device("cpu")) == [{"norm"}]
        (warning,) = caplog.messages
        assert warning.startswith("the kernels for norm do not work here (_sum_kernel), PyTorch does their work: ")
        assert warning.endswith(": module 'gluon' has no attribute 'thread_barrier'")
