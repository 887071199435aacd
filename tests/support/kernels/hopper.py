"""Marks for tests that need a GPU of compute capability 9.0."""

import pytest
import torch

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no GPU of compute capability 9.0",
)
GPU = pytest.mark.parametrize("device", [pytest.param(torch.device("cuda"), marks=[pytest.mark.gpu, on_hopper])])
