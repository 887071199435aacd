"""Experts in a quantized format: rows of all experts in one matrix, however a checkpoint stores them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.expert_choice import experts_of_format, make_experts
from kvern.layers.experts import NAMES, Experts, StackedExperts
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.row_experts import RowStackedExperts, SeparateExperts
from kvern.layers.unquantized import Unquantized
from kvern.models.loader import LoadOptions, load_model
from kvern.spec.model import MoeSpec
from tests.support.families import make_checkpoint
from tests.support.int8_experts import NAME, Int8
from tests.support.model_outputs import PROMPT, logits
from tests.support.scaled_rows import quantize

CPU = torch.device("cpu")


def int8_checkpoints(family: str, layers: str, folder: Path) -> tuple[Path, Path]:
    """A tiny model with int8 rows, and one with the same numbers as plain weights."""
    made = quantize(make_checkpoint(family, folder / "model"), folder, layers)
    config = json.loads((made.quantized / "config.json").read_text())
    config["quantization_config"]["quant_method"] = NAME
    (made.quantized / "config.json").write_text(json.dumps(config))
    stored = load_file(made.quantized / "model.safetensors")
    codes = {name: tensor.to(torch.int8) for name, tensor in stored.items() if name.endswith("qweight")}
    save_file(stored | codes, made.quantized / "model.safetensors")
    return made.quantized, made.rounded


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("mixtral", "."),
        ("qwen2_moe", "experts"),
        ("qwen3_moe", "."),
        ("glm4_moe", r"mlp\.experts"),
        ("mixtral", "down_proj"),
    ],
)
def test_logits_are_those_of_the_rounded_model(family: str, layers: str, tmp_path: Path) -> None:
    quantized, rounded = int8_checkpoints(family, layers, tmp_path)
    decoder = load_model(quantized)
    kinds = {type(module) for module in decoder.modules() if isinstance(module, Experts)}
    assert kinds == {SeparateExperts if layers == "down_proj" else RowStackedExperts}
    assert (logits(decoder, PROMPT) - logits(load_model(rounded), PROMPT)).abs().max() < 1e-4


def test_dummy_weights_are_numbers(tmp_path: Path) -> None:
    quantized, _ = int8_checkpoints("mixtral", ".", tmp_path)
    first, second = (logits(load_model(quantized, LoadOptions(load_format="dummy")), PROMPT) for _ in range(2))
    assert torch.equal(first, second) and first.isfinite().all() and first.std() > 0


def test_stacks_of_gate_and_up_apart(tmp_path: Path) -> None:
    """As GGUF files have them: plain, and in a format."""
    for folder in int8_checkpoints("qwen3_moe", "experts", tmp_path):
        expected = logits(load_model(folder), PROMPT)
        stored = load_file(folder / "model.safetensors")
        experts: dict[str, dict[int, Tensor]] = {}
        for name in list(stored):
            if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.(\w+)", name):
                ending = "" if match[4] == "weight" else f"_{match[4]}"
                experts.setdefault(f"{match[1]}.{match[3]}{ending}", {})[int(match[2])] = stored.pop(name)
        assert experts, "qwen3_moe stores experts one by one"
        stacked = {name: torch.stack([items[index] for index in sorted(items)]) for name, items in experts.items()}
        save_file(stored | stacked, folder / "model.safetensors")
        assert torch.equal(logits(load_model(folder), PROMPT), expected)


SPEC, HIDDEN = MoeSpec(5, 2, 12), 8


def make(formats: Mapping[str, LinearFormat]) -> Experts:
    rules = tuple((re.compile(f"experts.{name}_proj"), linear) for name, linear in formats.items())
    return make_experts(HIDDEN, SPEC, Build(torch.float32, CPU, 16, linear=LinearMethods(Unquantized(), rules)))


def random_parts(experts: Experts, generator: torch.Generator) -> dict[str, Tensor]:
    """What a checkpoint stores of every expert: all of it, small."""
    return {
        name: torch.randint(-7, 8, shape, generator=generator).to(torch.int8)
        if name.endswith("qweight")
        else torch.rand(shape, generator=generator) / 9
        for name, shape in experts.parts().items()
    }


def through(experts: Experts) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    x, weights = torch.randn(7, HIDDEN, generator=generator), torch.rand(7, 2, generator=generator)
    out: Tensor = experts(x, weights, torch.rand(7, 5, generator=generator).topk(2).indices, x)
    return out


def plain_of(parts: Mapping[str, Tensor], block: int) -> Tensor:
    """What plain experts of the same numbers make."""
    plain = experts_of_format(HIDDEN, SPEC, Build(torch.float32, CPU, 16), Unquantized())
    for name, codes in parts.items():
        if not name.endswith("qweight"):
            continue
        stem = name.removesuffix("qweight")
        scale = parts[stem + "scale"].repeat_interleave(max(1, block))[: codes.shape[0], None]
        plain.load(stem + "weight", codes * scale * parts.get(stem + "weight.factor", torch.tensor(1.0)))
    return through(plain)


@pytest.mark.parametrize("block", [0, 4, 8])  # blocks of 8 rows would reach from one part of 12 rows into the next
@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_rows_blocks_and_scalars_of_each_part(block: int, joins: bool, waits: bool) -> None:
    experts = make(dict.fromkeys(NAMES, Int8(block, joins)))
    assert isinstance(experts, RowStackedExperts if joins and block < 8 else SeparateExperts)
    optional = set(experts.optional_parts())
    assert ("experts.3.up_proj.weight.factor" in optional) == bool(block)
    assert ("experts.up_proj_weight.factor" in optional) == bool(block)
    parts = random_parts(experts, torch.Generator().manual_seed(block))
    for name, tensor in parts.items():
        rows = min(5, tensor.shape[0]) if tensor.dim() == 2 else 0
        if rows:
            experts.load(name, tensor[:rows])
        experts.load(name, tensor[rows:] if rows else tensor, rows)
    experts.finish()
    experts.waits = waits
    torch.testing.assert_close(through(experts), plain_of(parts, block), rtol=0, atol=1e-5)


@pytest.mark.parametrize("block", [0, 4])
@pytest.mark.parametrize("names", [NAMES, ("gate_up", "down")])
def test_parts_stacked_over_experts(block: int, names: tuple[str, ...]) -> None:
    experts = make(dict.fromkeys(NAMES, Int8(block)))
    shapes = experts.stacked_parts() if names == NAMES else experts.fused_parts()
    parts = random_parts(experts, torch.Generator().manual_seed(block))
    if names != NAMES:  # one factor for gate and up
        parts |= {name: parts[name.replace("up", "gate")] for name in parts if name.endswith("up_proj.weight.factor")}
    loaded = set()
    for name in names:
        kinds = {part.split(".", 3)[3] for part in parts}
        for kind in kinds:
            items = []
            for expert in range(5):
                mine = [parts[f"experts.{expert}.{part}_proj.{kind}"] for part in (name.split("_"))]
                items.append(torch.cat(mine) if mine[0].dim() else mine[0])
            stacked = f"experts.{name}_proj_{kind}"
            assert shapes[stacked] == (5, *items[0].shape)
            experts.load(stacked, torch.stack(items[:2]))
            experts.load(stacked, torch.stack(items[2:]), 2)
            loaded.add(stacked)
    assert loaded == set(shapes)
    torch.testing.assert_close(through(experts), plain_of(parts, block), rtol=0, atol=1e-5)


def test_formats_of_gate_up_and_down_may_differ() -> None:
    rows, blocks = Int8(), Int8(4)
    assert isinstance(make({"gate": rows, "up": rows, "down": blocks}), RowStackedExperts)
    mixed = make({"gate": rows, "up": blocks, "down": rows})
    assert isinstance(mixed, SeparateExperts) and mixed.fused_parts() == {}
    assert "experts.up_proj_weight.factor" in mixed.stacked_parts()
    assert "experts.gate_proj_weight.factor" not in mixed.stacked_parts()
    assert isinstance(make({}), StackedExperts)
    assert isinstance(make({"down": rows}), SeparateExperts)
