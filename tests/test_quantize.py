"""kvern quantize: what calibration sees, how weights are rounded, and the folders that are written."""

import json
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvern.cli.main import main
from kvern.errors import ConfigError
from kvern.models.checkpoint import read_headers
from kvern.models.decoder import Decoder
from kvern.models.loader import load_model
from kvern.quantize import awq, job
from kvern.quantize.blocks import CausalAttend, Walk
from kvern.quantize.calibration import Calibration, calibration
from kvern.quantize.checkpoint import Checkpoint
from kvern.quantize.gptq import Gptq
from kvern.quantize.grid import fit
from kvern.quantize.inputs import Inputs
from kvern.quantize.method import Method
from kvern.quantize.round_to_nearest import RoundToNearest
from kvern.quantize.scheme import FP8, FP8_BLOCK, INT8, Scheme, int4, named
from kvern.quantize.statistics import REPORT_NAME, plan_of
from kvern.quantize.writer import writing
from kvern.tokenizer import Tokenizer
from tests.families import make_checkpoint, reference_logits
from tests.tiny_model import make_tiny_model

CPU = torch.device("cpu")
ROWS = torch.randint(3, 131, (4, 24), generator=torch.Generator().manual_seed(3))
FAMILIES = [
    "llama_bias",
    "gemma3",
    "mixtral",
    "qwen2_moe",
    "glm4_moe",
    "granitemoe",
    "phi",
    "phi3",
    "cohere",
    "olmo2",
    "gpt_neox",
    "stablelm_parallel",
]
"""Norms before, behind, offset, shared and with biases; fused, reordered and stacked weights; experts of all kinds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def random_rows(count: int, inputs: int) -> torch.Tensor:
    """Rows whose entries depend on each other and differ in size, as those of a model do."""
    generator = torch.Generator().manual_seed(5)
    mixing = torch.randn(inputs // 4, inputs, generator=generator)
    sizes = torch.rand(inputs, generator=generator).mul(4).exp()
    rows = torch.randn(count, inputs // 4, generator=generator) @ mixing
    return (rows + 0.1 * torch.randn(count, inputs, generator=generator)) * sizes


def observed(rows: torch.Tensor) -> Inputs:
    inputs = Inputs(rows.shape[1], 1, CPU, products=True)
    inputs.add(rows)
    return inputs


def logits_of(walk: Walk) -> torch.Tensor:
    ends: Decoder = walk.ends()
    return ends.logits(ends.norm(walk.hidden.flatten(0, 1))).view(*walk.hidden.shape[:2], -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_walk_computes_the_model_and_scales_that_are_folded_change_nothing(family: str, tmp_path: Path) -> None:
    """Whatever the family; scales of all folds are random here."""
    checkpoint = Checkpoint(make_checkpoint(family, tmp_path / "model"), CPU)
    walk = Walk(checkpoint, ROWS)
    generator = torch.Generator().manual_seed(7)
    folded = 0
    for index in range(walk.layers):
        block = walk.block(index)
        walk.observe(block)
        for fold in awq.folds(block):
            folded += 1
            scale = torch.rand(block.tensors[fold.readers[0]].shape[1], generator=generator) + 0.5
            awq.apply(block, fold, awq.shared(scale, fold))
        walk.advance(block)
    expected = torch.stack([reference_logits(tmp_path / "model", row.tolist()) for row in ROWS])
    torch.testing.assert_close(logits_of(walk), expected, rtol=2e-3, atol=2e-3)
    assert folded >= (2 if family in ("gpt_neox", "phi", "olmo2", "stablelm_parallel") else 3)
