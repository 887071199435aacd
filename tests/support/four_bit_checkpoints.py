"""Tiny checkpoints in formats of four bits: GPTQ, AWQ, NVFP4, NF4, torchao and pack-quantized."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvern.formats.bitsandbytes import bitsandbytes_nf4
from kvern.formats.choice import all_but
from kvern.formats.fp4 import modelopt_nvfp4
from kvern.formats.torchao import torchao_int4
from kvern.layers.linear_format import LINEAR_METHODS, LinearFormat, LinearMethods
from kvern.layers.unquantized import Unquantized
from tests.support.families import make_checkpoint
from tests.support.packers import Pack, Stored, awq, gptq, integers, nf4, nvfp4, plain_int4, store, words
from tests.support.scaled_rows import Checkpoints

SIZES = {"hidden_size": 64, "intermediate_size": 128}
LINEAR = r"_proj$|experts\.\d"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
NESTED = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
OF_TESTS = "a format of tests"
FORMATS: dict[str, Callable[[], LinearFormat]] = {
    "nvfp4": lambda: modelopt_nvfp4({}, Unquantized()),
    "nf4": lambda: bitsandbytes_nf4({"bnb_4bit_quant_type": "nf4"}, Unquantized()),
    "torchao": lambda: torchao_int4({"group_size": 32}),
    "nested nf4": lambda: bitsandbytes_nf4(NESTED, Unquantized()),
}


def of_tests(name: str) -> dict[str, Any]:
    return {"quant_method": OF_TESTS, "format": name}


def make(
    family: str, folder: Path, pack: Pack, config: Mapping[str, Any], layers: str = LINEAR, **changes: Any
) -> Checkpoints:
    return store(make_checkpoint(family, folder / "model", **(SIZES | changes)), folder, pack, layers, config)


CASES: list[tuple[str, Pack, dict[str, Any]]] = [
    ("llama", gptq, GPTQ),
    ("llama_bias", partial(gptq, group=-1, version=2), GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"}),
    ("llama3", partial(gptq, symmetric=True, group=32), GPTQ | {"sym": True, "group_size": 32}),
    ("llama", partial(gptq, act_order=3), GPTQ | {"desc_act": True}),
    ("phi3", partial(gptq, act_order=3, version=2), GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}),
    ("mixtral", partial(gptq, act_order=3, bias=True), GPTQ | {"desc_act": True}),
    ("llama", partial(gptq, group=64, bits=8, bias=True), GPTQ | {"bits": 8, "group_size": 64}),
    ("mixtral", partial(gptq, group=64, bits=8, symmetric=True, bias=True), GPTQ | {"bits": 8, "group_size": 64}),
    ("phi3", awq, AWQ),
    ("qwen3", awq, {"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "modules_to_not_convert": None}),
    ("mixtral", partial(awq, group=32), AWQ | {"group_size": 32, "modules_to_not_convert": ["gate"]}),
    ("qwen3", nvfp4, of_tests("nvfp4")),
    ("mixtral", nvfp4, of_tests("nvfp4")),
    ("llama_bias", plain_int4, of_tests("torchao")),
    ("mixtral", plain_int4, of_tests("torchao")),
    ("llama_bias", nf4, of_tests("nf4")),
    ("phi3", partial(nf4, nested=True), of_tests("nested nf4")),
]
INTEGERS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def packed(weight: Tensor, act_order: int | None = None, group: int = 32) -> Stored:
    """The form "pack-quantized" with zeros, from its description; `act_order` as GPTQ."""
    if act_order is None:
        codes, zero, scale = integers(weight.float().numpy(), group, 4, False)
        rounded = torch.from_numpy(((codes - zero.repeat(group, 1)) * scale.repeat(group, 1)).astype(np.float32))
        shared = {"weight_packed": words(codes, 4), "weight_zero_point": words(zero.T, 4).T, "weight_scale": scale}
        tensors = {kind: torch.from_numpy(np.ascontiguousarray(item)) for kind, item in shared.items()}
    else:
        theirs, rounded = gptq(weight, group, act_order=act_order, version=2)
        zeros = (theirs["qzeros"].numpy().view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
        tensors = {
            "weight_packed": theirs["qweight"].t(),
            "weight_zero_point": torch.from_numpy(words(zeros.reshape(len(zeros), -1), 4)).t(),
            "weight_scale": theirs["scales"].t(),
            "weight_g_idx": theirs["g_idx"],
        }
    return {**tensors, "weight_shape": torch.tensor(weight.shape)}, rounded


@LINEAR_METHODS.register(OF_TESTS)
def by_name(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    """Formats that the configurations of several tools lead to, without one."""
    made = FORMATS[quantization["format"]]()
    if "layers" in quantization:
        return LinearMethods(unquantized, ((re.compile(quantization["layers"]), made),))
    return all_but([], made, unquantized)
