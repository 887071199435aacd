"""A kernel that does not work is never replaced in silence: each start names it."""

import logging
from dataclasses import replace

import pytest
import torch

from kvern.kernel_list import KERNELS, Inputs
from kvern.kernel_list.entry import Call
from kvern.runner import kernel_check
from kvern.spec.model import ModelSpec
from tests.kernels.models import LARGE_MODELS, spec_of


def test_a_kernel_that_does_not_compile_is_named_at_every_start(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(spec: ModelSpec, inputs: Inputs, *arguments: object) -> Call:
        raise AttributeError("module 'gluon' has no attribute 'thread_barrier'\nat 3:4")

    def working(spec: ModelSpec, inputs: Inputs, *arguments: object) -> Call:
        return Call("", lambda: torch.zeros(1), lambda: torch.zeros(1))

    made = {"add + RMSNorm": broken, "RMSNorm": working, "gated activation": working}
    planted = tuple(replace(kernel, make=made[kernel.name]) for kernel in KERNELS if kernel.name in made)
    monkeypatch.setattr(kernel_check, "kernels_of", lambda spec: planted)
    model = spec_of("llama", LARGE_MODELS), Inputs(device, torch.float32, "zeros")
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            (groups,) = kernel_check.working_kernels([model])
        assert groups == {"activation"}
        (warning,) = caplog.messages
        assert warning.startswith("the kernels for norm do not work here (add + RMSNorm), PyTorch does their work: ")
        assert warning.endswith(": module 'gluon' has no attribute 'thread_barrier'")
