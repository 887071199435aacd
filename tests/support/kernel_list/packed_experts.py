"""The experts of a mixture, of the codes that a model stores."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from kvern.formats.gguf.header import BY_NAME
from kvern.kernels.codes import CODES, readable
from kvern.kernels.expert_lanes import STEP, LaneWeight, in_lanes, knows_lanes
from kvern.kernels.moe import ACTIVATIONS
from kvern.kernels.moe_direct import runs_direct
from kvern.kernels.moe_lanes import LANE_ACTIVATIONS, lane_experts, rows_of_block
from kvern.kernels.moe_packed import packed_experts
from kvern.kernels.moe_scaled import coded_experts, hopper_codes
from kvern.kernels.packed import Packed
from kvern.kernels.quantize_rows import Coding
from kvern.spec.model import ModelSpec, MoeSpec
from tests.support.kernel_list.entry import Call, Inputs, Kernel, PackedKind
from tests.support.kernel_list.experts import OTHER_TILES, activated, as_chosen, blocks, forms, make_biases, moes
from tests.support.kernel_list.quantized import bytes_of, multiplies_by_codes, plain_of, random_packed

Sizes = Iterator[tuple[Any, ...]]


def _rows(packed: Packed, first: int, count: int) -> Packed:
    """A matrix of some of the rows, where a scale begins."""
    per = packed.outputs_per_scale

    def run(item: torch.Tensor | None, every: int) -> torch.Tensor | None:
        return None if item is None else item[first // every : -(-(first + count) // every)]

    codes = packed.codes[first : first + count]
    return packed._replace(
        codes=codes, scale=run(packed.scale, per), zero=run(packed.zero, per), factor=run(packed.factor, 1)
    )


class ExpertWay(NamedTuple):
    """The kernels that multiply: of codes by codes, for Hopper, in tiles of a fixed number of rows, or in lanes."""

    by_codes: bool = False
    hopper: bool = False
    tiles: int = 0
    lanes: bool = False


BY_NUMBERS = ExpertWay()
"""Weights become numbers inside the product."""


def _experts(
    spec: ModelSpec,
    inputs: Inputs,
    moe: MoeSpec,
    gate_up: PackedKind,
    down: PackedKind,
    tokens: int,
    way: ExpertWay = BY_NUMBERS,
) -> Call:
    hidden, width = spec.hidden_size, moe.width
    x, add = inputs.numbers(tokens, hidden), inputs.numbers(tokens, hidden) if moe.shared_width else None
    biases = make_biases(moe, hidden, inputs)
    matrices = [random_packed(inputs, kind, kind.outputs) for kind in (gate_up, down)]
    weights, chosen = inputs.numbers(tokens, moe.experts, dtype=torch.float32).topk(moe.top_k)
    chosen = as_chosen(moe, chosen.where(chosen < moe.slots, -1))
    of = moe.experts if moe.placed_over > 1 else None
    codes = [
        Coding(kind.code, 0 if kind.group == kind.inputs else kind.group, late=way.hopper) for kind in (gate_up, down)
    ]

    def through(values: torch.Tensor, matrix: int, expert: int) -> torch.Tensor:
        if way.by_codes:
            made, scale = codes[matrix](values.to(x.dtype).contiguous())
            spread = scale.double().repeat_interleave(-(-made.shape[1] // scale.shape[1]), 1)
            values = made.double() * spread[:, : made.shape[1]]
        outputs = (2 * width, hidden)[matrix]
        return values.double() @ plain_of(_rows(matrices[matrix], expert * outputs, outputs)).T

    def reference() -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device) if add is None else add.double()
        for expert in range(moe.slots):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            if len(token):
                first, second = (0, 0) if biases is None else (bias[expert].double() for bias in biases)
                made = through(activated(moe, through(x[token], 0, expert) + first), 1, expert) + second
                out.index_add_(0, token, made * weights[token, place].double()[:, None])
        return out

    arranged = [_arranged(inputs, matrix) for matrix in matrices] if way.lanes else []

    def launch() -> torch.Tensor:
        if way.lanes:
            gated, last = arranged
            return lane_experts(
                x, gated, last, weights, chosen, moe.activation, experts=moe.slots, biases=biases, add=add, of=of
            )
        one, other = map(readable, matrices)
        if way.by_codes:
            return coded_experts(
                x, one, other, weights, chosen, moe.activation, experts=moe.slots, rounded=codes, add=add, of=of,
                hopper=way.hopper, tiles=way.tiles,
            )  # fmt: skip
        return packed_experts(
            x, one, other, weights, chosen, moe.activation, experts=moe.slots, biases=biases, add=add, of=of
        )

    touched = 1 - (1 - moe.top_k / moe.experts) ** tokens
    moved, operations = touched * sum(map(bytes_of, matrices)), 2 * tokens * moe.top_k * 3 * width * hidden
    return Call(f"{tokens} tokens {gate_up.code} {down.code}", launch, reference, moved, operations)


def _arranged(inputs: Inputs, matrix: Packed) -> LaneWeight:
    """The matrix in lanes; where nothing runs, memory like that."""
    if inputs.device.type == "cuda":
        return in_lanes(matrix._replace(codes=matrix.codes.clone()))
    outputs, width = matrix.codes.shape
    return LaneWeight(
        matrix.codes.view(torch.int32), inputs.numbers(-(-2 * width // STEP), outputs, dtype=torch.float32).int()
    )


def _kinds(spec: ModelSpec, inputs: Inputs) -> Iterator[tuple[MoeSpec, PackedKind, PackedKind]]:
    """Experts, and how their gates and ups, and their downs, are stored."""
    for moe in moes(spec):
        shapes = {
            "experts.gate_up_proj": (moe.slots * 2 * moe.width, spec.hidden_size),
            "experts.down_proj": (moe.slots * spec.hidden_size, moe.width),
        }
        found = [
            [kind for kind in inputs.packed if kind.part == part and (kind.outputs, kind.inputs) == shape]
            for part, shape in shapes.items()
        ]
        if moe.gated and moe.activation in ACTIVATIONS:
            yield from ((moe, gate_up, down) for gate_up, down in itertools.product(*found))


def _expert_bytes(moe: MoeSpec, *kinds: PackedKind) -> int:
    """Of an expert's codes."""
    return int(sum(kind.outputs * kind.inputs * _byte_share(kind) for kind in kinds) / moe.slots)


def _launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    """Where codes are multiplied by codes only tokens that are not sorted."""
    for moe, *kinds in _kinds(spec, inputs):
        expert_bytes, coded = _expert_bytes(moe, *kinds), _by_codes(moe, kinds, inputs)
        if _by_lanes(moe, kinds, inputs):
            continue
        for tokens in forms(moe, inputs.batch_tokens, expert_bytes):
            if not coded or runs_direct(tokens, moe.top_k, moe.experts, expert_bytes):
                yield moe, *kinds, tokens


def _byte_share(kind: PackedKind) -> float:
    """Bytes of an input's code."""
    block = BY_NAME.get(kind.code)
    return 1 / CODES[kind.code].planes if block is None else block.size / block.numbers


def _by_codes(moe: MoeSpec, kinds: Sequence[PackedKind], inputs: Inputs) -> bool:
    """Whether activations are rounded to codes, and multiplied as such."""
    return moe.has_plain_gate and all(kind.activations and multiplies_by_codes(kind, inputs) for kind in kinds)


def _by_lanes(moe: MoeSpec, kinds: Sequence[PackedKind], inputs: Inputs) -> bool:
    """Whether kernels for Hopper multiply them in lanes."""
    forms = ((kind.code, kind.group, kind.scale, kind.inputs) for kind in kinds)
    known = all(knows_lanes(*form) and not kind.factor for form, kind in zip(forms, kinds, strict=True))
    return inputs.hopper and known and inputs.dtype == torch.bfloat16 and moe.activation in LANE_ACTIVATIONS


def _lanes_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for moe, *kinds in _kinds(spec, inputs):
        if _by_lanes(moe, kinds, inputs):
            for tokens in forms(moe, inputs.batch_tokens, _expert_bytes(moe, *kinds), rows_of_block):
                yield moe, *kinds, tokens, ExpertWay(lanes=True)


def _lanes_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for sizes in itertools.islice(_lanes_launched(spec, inputs), 1):
        yield from ((*sizes[:3], tokens, sizes[4]) for tokens in (1, 64, 8192))


def _sorted(spec: ModelSpec, inputs: Inputs) -> Sizes:
    """One number of tokens for each size of blocks, where codes are multiplied by codes."""
    for moe, *kinds in _kinds(spec, inputs):
        if _by_codes(moe, kinds, inputs):
            for tokens in blocks(moe, inputs.batch_tokens, _expert_bytes(moe, *kinds)):
                yield moe, *kinds, tokens


def _coded_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for moe, *kinds in _kinds(spec, inputs):
        if _by_codes(moe, kinds, inputs):
            expert_bytes = _expert_bytes(moe, *kinds)
            for tokens in forms(moe, inputs.batch_tokens, expert_bytes):
                if not runs_direct(tokens, moe.top_k, moe.experts, expert_bytes):
                    yield moe, *kinds, tokens, ExpertWay(by_codes=True)
    for sizes in _sorted(spec, inputs):
        yield from ((*sizes, ExpertWay(by_codes=True, tiles=tiles)) for tiles in OTHER_TILES)


def _timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for moe, gate_up, down in itertools.islice(_kinds(spec, inputs), 1):
        yield from ((moe, gate_up, down, tokens) for tokens in (1, 32, 8192))


def _coded_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for moe, gate_up, down, *_ in itertools.islice(_coded_launched(spec, inputs), 1):
        yield from ((moe, gate_up, down, tokens, ExpertWay(by_codes=True)) for tokens in (32, 8192))


def _hopper_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for moe, gate_up, down, *sizes in _sorted(spec, inputs):
        kinds = gate_up, down
        known = all(hopper_codes(kind.code, inputs.dtype, spec.hidden_size, moe.width) for kind in kinds)
        if inputs.hopper and known and all(kind.group == kind.inputs for kind in kinds):
            yield moe, *kinds, *sizes, ExpertWay(by_codes=True, hopper=True)


def _hopper_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for sizes in itertools.islice(_hopper_launched(spec, inputs), 1):
        yield from ((*sizes[:3], tokens, sizes[4]) for tokens in (32, 256, 8192))


KERNELS = (
    Kernel("quantized experts", "quantized", _experts, _launched, _timed),
    Kernel("experts, codes by codes", "quantized", _experts, _coded_launched, _coded_timed),
    Kernel("experts in lanes on Hopper", "hopper_linear", _experts, _lanes_launched, _lanes_timed),
    Kernel("experts, codes by codes on Hopper", "hopper_linear", _experts, _hopper_launched, _hopper_timed),
)
