"""What steps with spans launch is compiled before the first request, in models that have spans and in no others."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kvern.config import EngineConfig
from kvern.layers.linear_format import LinearMethods
from kvern.layers.unquantized import Unquantized
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from kvern.runner.loaded_model import Stored
from tests.kernels.recorded import recorded_at_start
from tests.support.families import make_checkpoint
from tests.support.kernels.attention_batches import make_batch, prefill, split, with_spans


def launch(attend: Callable[..., object], **options: int) -> object:
    batch = make_batch(torch.device("cpu"), [0, 40], [9, 20], 4, 2, 64, torch.bfloat16)
    return attend(with_spans(batch), **options)


LAUNCHES = [partial(launch, attend, **options) for attend in (prefill, split) for options in ({}, {"window": 6})]
"""An interpreter takes what a compiler refuses: these are compiled, too."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("spans", [True, False])
def test_steps_with_spans_are_compiled_at_start(spans: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_from_config(read_config(make_checkpoint("gemma3", tmp_path)))
    layers = tuple(replace(layer, mixer=replace(layer.attention, spans=spans)) for layer in spec.layers)
    model = Stored(replace(spec, layers=layers), LinearMethods(Unquantized()))
    config = EngineConfig("", dtype="bfloat16", max_model_len=4096, block_size=16)
    launched = recorded_at_start([(config, torch.bfloat16, model, False)], monkeypatch)
    for kernel in ("_prefill_attention_kernel", "_split_attention_kernel"):
        ends = {arguments[2].ends is not None for (name, _), arguments in launched.items() if name == kernel}
        assert ends == ({True, False} if spans else {False})
