"""Weights that an engine of this process takes while it runs."""

import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from kvern import LLM
from kvern.request.weights import WeightSource
from tests.support.internals import core_of, engine_of


def change_weights(llm: LLM, version: str, path: Path, *, keep: bool = False) -> None:
    core = core_of(llm)
    core.read_weights(version, [WeightSource(str(path))])
    while (found := core.weights_found()) is None:
        time.sleep(0.01)
    assert found.error is None, found.error
    engine_of(llm)._outputs.process(core.take_weights(version, keep))  # tokens of steps on their way


def perturbed(folder: Path, name: str = "", spread: float = 0.2, seed: int = 5) -> dict[str, torch.Tensor]:
    """The tensors of a model's file whose names contain `name`, each a little different."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: weight + spread * torch.randn(weight.shape, generator=generator).to(weight.dtype)
        for key, weight in load_file(folder / "model.safetensors").items()
        if name in key
    }
