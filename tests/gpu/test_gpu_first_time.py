"""Nothing happens for the first time while a user waits: a fresh process compiles and captures before it is ready.

Run with `pytest -m gpu`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.families import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def check(*models: str) -> None:
    command = [sys.executable, "-m", "tests.support.first_time", *models]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    for model, found in json.loads(done.stdout.splitlines()[-1]).items():
        assert found["steps"] > 200, model
        for what in ("compiled", "captured", "far slower"):
            assert not found[what], f"{model}: {what}: {found[what]}"
        assert "torch._inductor" not in found["imported"], model


def test_no_step_of_a_fresh_process_does_anything_for_the_first_time(tmp_path: Path) -> None:
    """Experts, whose kernels are launched by the number of tokens, stand in a model of their own."""
    make_checkpoint("qwen3_moe", tmp_path, max_position_embeddings=512)
    check("kvern-1m", str(tmp_path))


def test_no_step_with_a_draft_model_does_anything_for_the_first_time(tmp_path: Path) -> None:
    """Whose sizes are others than the model's, and whose weights may be quantized."""
    model = make_checkpoint("llama", tmp_path / "model", max_position_embeddings=512)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2}
    draft = make_checkpoint("qwen3", tmp_path / "draft", **sizes, head_dim=32, max_position_embeddings=512)
    check(*(f"{model}+{draft}{quantization}" for quantization in ("", "+int4", "+int8", "+fp8")))
