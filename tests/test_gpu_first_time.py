"""Nothing happens for the first time while a user waits: a fresh process compiles and captures before it is ready.

Run with `pytest -m gpu`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.families import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def test_no_step_of_a_fresh_process_does_anything_for_the_first_time(tmp_path: Path) -> None:
    """Experts, whose kernels are launched by the number of tokens, stand in a model of their own."""
    make_checkpoint("qwen3_moe", tmp_path, max_position_embeddings=512)
    command = [sys.executable, "-m", "tests.first_time", "kvern-1m", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    for model, found in json.loads(done.stdout.splitlines()[-1]).items():
        assert found["steps"] > 200, model
        for what in ("compiled", "captured", "far slower"):
            assert not found[what], f"{model}: {what}: {found[what]}"
        assert "torch._inductor" not in found["imported"], model
