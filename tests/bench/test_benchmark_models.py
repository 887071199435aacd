"""The shapes in `benchmarks/models/`, which the performance tables name: anyone can run them with random weights."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config

ROOT = Path(__file__).parents[2]
FOLDERS = sorted((ROOT / "benchmarks/models").iterdir())
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_shape_is_described(folder: Path) -> None:
    config = read_config(folder)
    assert len(spec_from_config(config).layers) == config.get("text_config", config)["num_hidden_layers"]


@pytest.mark.nightly
def test_the_command_of_the_documentation_runs_a_shape_without_weights_and_tokenizer(tmp_path: Path) -> None:
    config: dict[str, Any] = json.loads((ROOT / "benchmarks/models/llama-3.1-8b/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | SMALL))
    command = [sys.executable, "-m", "kvern", "bench", "offline", "--model", str(tmp_path), "--load-format", "dummy"]
    options = ["--workload", "decode1", "--device", "cpu", "--threads", "1", "--max-model-len", "512"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0 and "decode1" in done.stdout, done.stderr
