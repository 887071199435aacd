"""A kernel that does not work is never replaced in silence: each start names it."""

import logging
from typing import Any, NamedTuple

import pytest
import torch

from kvern.kernels.recording import Launches
from kvern.runner.kernel_check import broken_groups


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
    def run(self) -> None:
        """What loads the kernel."""


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
