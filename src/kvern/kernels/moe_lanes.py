"""The experts of a mixture in MXFP4 on Hopper GPUs, as `kernels/moe_packed.py` has them on other cards.

All experts' rows stand in one matrix, in lanes (`kernels/expert_lanes.py`). One kernel multiplies blocks of rows of one
expert, whatever their number; for one or a few tokens each pair of token and expert is a block, so that nothing has to
be sorted.
"""

import torch

from kvern.kernels.expert_lanes import LaneWeight
from kvern.kernels.launch import next_power_of_2
from kvern.kernels.moe_direct import runs_direct
from kvern.kernels.moe_routing import Alignment, Routed, align, through_blocks

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
    routed = Routed.over(x.contiguous(), weights, topk_ids.int(), add, of)
    expert_bytes = (gate_up.codes.nbytes + down.codes.nbytes) // experts
    if pairs <= MOST_ALONE and of is None and runs_direct(tokens, top_k, experts, expert_bytes):
        shape, chosen = ALONE, routed.topk_ids.view(-1)
        blocks = Alignment(alone(x.device)[: pairs * FEWEST_ROWS], chosen, chosen)
    else:
        rows = rows_of_block(pairs, of or experts)
        shape, blocks = SHAPES[rows], align(routed.topk_ids, experts, rows)
    biased = biases or (None, None)

    def first(x: torch.Tensor, blocks: Alignment, out: torch.Tensor) -> None:
        stream_lanes(x, gate_up, out, blocks, shape, top_k=top_k, activation=activation, bias=biased[0])

    def second(x: torch.Tensor, blocks: Alignment, out: torch.Tensor) -> None:
        stream_lanes(x, down, out, blocks, shape, bias=biased[1], weights=routed.weights, early=True)

    return through_blocks(routed, blocks, width, first, second)
