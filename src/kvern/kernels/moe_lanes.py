"""The experts of a mixture in MXFP4 on Hopper GPUs, as `kernels/moe_packed.py` has them on other cards.

All experts' rows stand in one matrix, in lanes (`kernels/expert_lanes.py`). One kernel multiplies blocks of rows of one
expert, whatever their number; for one or a few tokens each pair of token and expert is a block, so that nothing has to
be sorted.
"""

import torch

from kvern.kernels.expert_lanes import LaneWeight
from kvern.kernels.launch import next_power_of_2
from kvern.kernels.moe import sum_parts
from kvern.kernels.moe_direct import runs_direct
from kvern.kernels.moe_routing import Alignment, align

LANE_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")
"""Activations of gates that the kernel supports."""
FEWEST_ROWS, MOST_ROWS = 8, 128
"""The limits of the rows of a block."""
MANY_ROWS = 256
"""The mean rows of an expert from which blocks are the largest."""
MOST_NUMBERS = 1 << 31
"""The limit of activations: rows are found by 32 bits."""
MOST_ALONE = 64
"""Pairs whose blocks are not sorted."""
_ALONE: dict[torch.device, torch.Tensor] = {}


def alone(device: torch.device) -> torch.Tensor:
    """`Alignment.pairs` of blocks that have one row each, [MOST_ALONE * FEWEST_ROWS]; made before graphs are."""
    if device not in _ALONE:
        pairs = torch.full((MOST_ALONE, FEWEST_ROWS), MOST_NUMBERS - 1, dtype=torch.int32, device=device)
        pairs[:, 0] = torch.arange(MOST_ALONE, dtype=torch.int32, device=device)
        _ALONE[device] = pairs.flatten()
    return _ALONE[device]


def rows_of_block(pairs: int, experts: int) -> int:
    """Twice what an expert gets on average, so that most experts' weights are read by one block, or the most for many.

    In between more blocks are faster than blocks of which half is empty.
    """
    average = pairs // experts
    if average >= MANY_ROWS:
        return MOST_ROWS
    return min(MOST_ROWS // 2, max(FEWEST_ROWS, next_power_of_2(max(1, 2 * average))))


def lane_experts(
    x: torch.Tensor,
    gate_up: LaneWeight,
    down: LaneWeight,
    weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    *,
    experts: int,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    add: torch.Tensor | None = None,
    of: int | None = None,
) -> torch.Tensor:
    """Computes `packed_experts` for weights in lanes and x in bfloat16.

    Raises ValueError for more activations than the kernel can number.
    """
    from kvern.kernels.stream_lanes_hopper import ALONE, SHAPES, stream_lanes

    (tokens, top_k), pairs = topk_ids.shape, topk_ids.numel()
    width = gate_up.codes.shape[0] // experts // 2
    if pairs * max(x.shape[1], width) >= MOST_NUMBERS:
        raise ValueError(f"{tokens} tokens in a step are too many for experts in MXFP4; lower max_batch_tokens")
    x = x.contiguous()
    topk_ids = topk_ids.int().contiguous()
    weights = weights.contiguous()
    expert_bytes = (gate_up.codes.nbytes + down.codes.nbytes) // experts
    some = None if of is None else topk_ids
    if pairs <= MOST_ALONE and some is None and runs_direct(tokens, top_k, experts, expert_bytes):
        rows = FEWEST_ROWS
        shape = ALONE
        chosen = topk_ids.view(-1)
        blocks = Alignment(alone(x.device), chosen, chosen)
    else:
        rows = rows_of_block(pairs, of or experts)
        shape, blocks = SHAPES[rows], align(topk_ids, experts, rows)
    first_bias, second_bias = biases or (None, None)
    gated = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    stream_lanes(x, gate_up, gated, blocks, rows, shape, top_k=top_k, activation=activation, bias=first_bias)
    parts = torch.empty(pairs, x.shape[1], dtype=x.dtype, device=x.device)
    stream_lanes(gated, down, parts, blocks, rows, shape, bias=second_bias, weights=weights, early=True)
    return parts if top_k == 1 and add is None and some is None else sum_parts(parts, top_k, add, some=some)
