"""A plain install on a CPU does all of its work without Triton and what else the tests have and it has not."""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvern.layers.linear_format import LINEAR_METHODS
from tests.kernels.models import TINY, TINY_MODELS
from tests.support.plain_install import METHODS

WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS}
FORMATS: Mapping[str, dict[str, Any]] = {
    "awq": {"bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "compressed-tensors": {"format": "naive-quantized", "config_groups": {"0": GROUP}},
    "fbgemm_fp8": {"activation_scale_ub": 2.0},
    "fp8": {"weight_block_size": [16, 16]},
    "gptq": {"bits": 4, "group_size": 16, "sym": False, "desc_act": False},
    "modelopt": {"quant_algo": "NVFP4"},
    "mxfp4": {},
    "torchao": {
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"granularity": None}}}
    },
}
"""A quantization_config of each format that a config.json may name."""
SIZES = {"hidden_size": 64, "intermediate_size": 128}


pytestmark = pytest.mark.timeout(1200)  # a machine with much else to do takes minutes
SAMPLED = "llama", "qwen3_moe", "gptq", "modelopt", "torchao"


def configs() -> dict[str, dict[str, Any]]:
    """The config.json of a model of each family and each format."""
    families = {name: {"model_type": name} | fields for name, fields in TINY_MODELS.items()}
    llama = {"model_type": "llama"} | TINY | SIZES
    return families | {
        name: llama | {"quantization_config": {"quant_method": name} | FORMATS[name]} for name in FORMATS
    }


def answer(folder: Path, names: Collection[str], methods: Collection[str]) -> None:
    """Have models of random weights, by their config.json alone, and quantized ones answer in a plain install."""
    for name in names:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(configs()[name] | {"torch_dtype": "bfloat16"}))
    given = [f"{folder / name}+dummy" for name in names]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.support.plain_install", *given, "--methods", *methods]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in given if f"{line} " not in done.stdout] == []
    assert "Traceback" not in done.stderr
    refused = done.stdout.partition("refused ")[2].splitlines()[0].split()
    assert {"triton", "transformers", "pyarrow", "gguf", "pytest"} <= {*refused}


def test_a_plain_install_answers_in_some_formats_and_families(tmp_path: Path) -> None:
    answer(tmp_path, SAMPLED, ["int4"])


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))
def test_a_plain_install_answers_in_every_format_and_family(part: int, tmp_path: Path) -> None:
    own = {name for name in LINEAR_METHODS.names if LINEAR_METHODS.find(name).__module__.startswith("kvern.")}
    assert own - set(FORMATS) == {"gguf"}
    answer(tmp_path, [*configs()][part::4], [*METHODS][part::4])
