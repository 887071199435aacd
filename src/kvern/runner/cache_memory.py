"""The memory of a KV cache that changes while the engine runs."""

from collections.abc import Sequence

from torch import Tensor

from kvern.cpu.asleep import give_back


def map_blocks(pools: Sequence[Tensor], blocks: int) -> int:
    """Gives the memory of other than the first blocks back to the system, which brings it again when it is used.

    `pools`: [parts, blocks, ...] each, in a CPU's memory. Returns the number of blocks that may be used.
    """
    for pool in pools:
        for part in pool:
            give_back(part[blocks:])
    return blocks
