"""`kvern bench kernels` on a GPU. Run with `pytest -m gpu`."""

import pytest
import torch

from kvern.cli.main import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_kernels_of_a_small_model_are_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", "kernels", "--model", "kvern-1m", "--codes", "int4"]) == 0
    shown = capsys.readouterr().out
    for name in ("int4, ", "attention", "sampling, filtered", "_decode_attention_kernel", "TFLOP/s"):
        assert name in shown
