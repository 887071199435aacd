"""Quantized experts that change their places: whatever their format, each rank then computes what others did."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvern.errors import ConfigError
from kvern.formats.scaled import TENSOR, Rounding, Scaled
from kvern.layers.experts import Experts
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.row_experts import RowStackedExperts
from kvern.layers.unquantized import Unquantized
from kvern.models.decoder import Decoder
from kvern.models.share import WholeExperts
from kvern.ranks.ranks import Ranks
from kvern.runner.ranks.experts import check_moves, experts_of, move_experts
from tests.support.cache_folder import load_kernels
from tests.support.configs import GPT_OSS
from tests.support.families import make_checkpoint
from tests.support.four_bit_checkpoints import AWQ, GPTQ, LINEAR, make, of_tests
from tests.support.gguf_files import MIXES, folder_of, write_gguf
from tests.support.model_outputs import PROMPT, logits
from tests.support.packers import Pack, awq, gptq, nf4, nvfp4, plain_int4, store
from tests.support.packers import mxfp4_experts as pack_published
from tests.support.placed_experts import SPECS, loaded, placed
from tests.support.rank_threads import SECONDS, load_with, of_ranks
from tests.support.scaled_checkpoints import CHECKPOINTS, quantize

CPU_KERNELS = ("cpu_linear", "cpu_packed")
EXPERTS = {"num_local_experts": 5, "num_experts": 5}
"""Some families call them the one, and others the other; with a copy of one, two ranks have as many slots."""
WHOLE = WholeExperts(1)
ANY_ORDER = GPTQ | {"desc_act": True, "dynamic": {"-:.*self_attn": {}}}


def scaled(name: str, folder: Path) -> Path:
    family, packing, config = CHECKPOINTS[name]
    sizes = {"hidden_size": 64, "shared_expert_intermediate_size": 64}
    return quantize(make_checkpoint(family, folder / "model", **sizes, **EXPERTS), folder, packing, config).quantized


def four_bits(pack: Pack, config: dict[str, Any], folder: Path, layers: str = LINEAR) -> Path:
    return make("mixtral", folder, pack, config, layers, head_dim=32).quantized


def gpt_oss(folder: Path) -> Path:
    model = make_checkpoint("gpt_oss", folder / "model", hidden_size=64, intermediate_size=32, **EXPERTS)
    return store(model, folder, pack_published, r"experts\.\w+_proj$", GPT_OSS["quantization_config"]).quantized


def gguf_file(mix: str, folder: Path) -> Path:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 128}
    model, kinds = make_checkpoint("qwen3_moe", folder / "model", mlp_only_layers=[], **sizes, **EXPERTS), MIXES[mix]
    made = write_gguf(model, folder, lambda name: next(kinds[part] for part in kinds if re.search(part, name)))
    return folder_of(made.file, folder)


def plain(folder: Path) -> Path:
    return make_checkpoint("mixtral", folder)


FOLDERS: dict[str, Callable[[Path], Path]] = {
    **{name: partial(scaled, name) for name in ("fp8 of experts", "compressed-tensors, weights alone")},
    "fp8 by blocks": partial(scaled, "fp8 by blocks at which no expert begins"),
    "gptq": partial(four_bits, gptq, GPTQ),
    "gptq in any order": partial(four_bits, partial(gptq, act_order=3), ANY_ORDER, layers=r"experts\.\d"),
    "awq": partial(four_bits, awq, AWQ),
    "nvfp4": partial(four_bits, nvfp4, of_tests("nvfp4")),
    "nf4": partial(four_bits, nf4, of_tests("nf4")),
    "torchao": partial(four_bits, plain_int4, of_tests("torchao")),
    "mxfp4 with biases": gpt_oss,
    **{f"gguf {mix}": partial(gguf_file, mix) for mix in ("q4_k_m", "q3_k_m", "older", "plain")},
    **dict.fromkeys(("fp8", "int8", "int4"), plain),
}
BY_DAY = ("fp8 by blocks", "gptq in any order", "nvfp4", "mxfp4 with biases", "gguf q4_k_m", "int8")


def exchange(decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Logits before and after each of two ranks takes the experts of the other, in all layers."""
    layers, ranks = experts_of(decoder), decoder.build.ranks
    before, placements = logits(decoder, PROMPT), {}
    for layer, experts in layers.items():
        if experts.share.placement is not None:
            placements[layer] = experts.share.placement[::-1]
    assert placements
    check_moves(layers, ranks)
    move_experts(layers, placements, ranks)
    return before, logits(decoder, PROMPT)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "kernels", [pytest.param((), id="PyTorch", marks=pytest.mark.nightly), pytest.param(CPU_KERNELS, id="kernels")]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in FOLDERS]
)
def test_experts_of_every_format_move(name: str, kernels: tuple[str, ...], tmp_path: Path) -> None:
    for group in kernels:
        load_kernels(group, 1)
    folder, quantization = FOLDERS[name](tmp_path), name if FOLDERS[name] is plain else None
    load = partial(load_with, dtype="float32", kernels=frozenset(kernels), quantization=quantization)
    (before, after), other = of_ranks(folder, 2, exchange, partial(load, whole_experts=WHOLE))
    assert (after - before).abs().max() < 1e-4
    assert torch.equal(after, other[1])
    if not name.startswith(("fp8", "int")):  # which round the inputs of attention's output on each rank
        assert (after - logits(load(folder), PROMPT)).abs().max() < 1e-4


def with_zeros(experts: Experts, rank: int) -> None:
    assert isinstance(experts, RowStackedExperts)
    zeros = torch.full((experts.down_proj.shape.outputs, 1), rank, dtype=torch.int8)
    experts.down_proj.zero = torch.nn.Parameter(zeros, requires_grad=False) if rank else None


ZEROS = Scaled("int8", zeros=True, zeros_needed=False)
STATIC = Scaled("e4m3", TENSOR, Rounding("e4m3"), static=True)


@pytest.mark.parametrize(
    ("rules", "change", "stored"),
    [
        ({"experts": ZEROS}, with_zeros, "int8 by row"),
        ({"experts.(gate|up)": STATIC}, None, "fp8 by tensor, W8A8 static and unquantized"),
    ],
    ids=["zeros on one rank", "scales that kernels keep"],
)
def test_experts_that_are_not_stored_alike_stay(
    rules: dict[str, LinearFormat], change: Callable[[Experts, int], None] | None, stored: str, tmp_path: Path
) -> None:
    linear = LinearMethods(Unquantized(), tuple((re.compile(names), item) for names, item in rules.items()))

    def check(rank: int) -> str:
        ranks = Ranks(rank, 2)
        ranks.connect(tmp_path / "meeting", torch.device("cpu"), SECONDS)
        experts = loaded(placed(SPECS["gated"], 2), linear, ranks, "parts")
        if change is not None:
            change(experts, rank)
        with pytest.raises(ConfigError) as refused:
            check_moves({1: experts}, ranks)
        return str(refused.value)

    with ThreadPoolExecutor(2) as threads:
        for message in threads.map(check, range(2)):
            assert f"not all experts of model are stored alike, as {stored}" in message
